"""Models loaded as users name them, on the native device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf
from tests.tiny_models import TINY, write_model

from loadproof import LLM, SamplingParams, models
from loadproof.config import ConfigError, EngineConfig
from loadproof.engine import loader
from loadproof.engine.loader import load_model
from loadproof.tokenizer import TokenizerError
from loadproof.weights.resolve import ModelNotFoundError
from loadproof.weights.safetensors import SafetensorsSource
from loadproof.weights.tensors import WeightsError

SMALL = {"num_blocks_override": 16, "num_threads": 1, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def test_a_directory_serves_the_models_own_tokens(directory: Path) -> None:
    with LLM(directory, **SMALL) as llm:
        for case in TINY["llama"].golden:
            params = SamplingParams(temperature=0, max_tokens=len(case.greedy), ignore_eos=True)
            (output,) = llm.generate(case.prompt, params)
            assert output.outputs[0].token_ids == list(case.greedy)


def test_a_directory_chats_by_its_template(directory: Path) -> None:
    with LLM(directory, **SMALL) as llm:
        (output,) = llm.chat([{"role": "user", "content": "tea"}], SamplingParams(max_tokens=3, seed=1))
    assert output.prompt == "<s>user: tea\nassistant:"
    assert output.prompt_token_ids[0] == 0
    assert output.prompt_token_ids.count(0) == 1


def test_settings_reach_the_device(directory: Path) -> None:
    config = EngineConfig(model=str(directory), max_model_len=100, block_size=16, served_model_name="tiny")
    model = load_model(config)
    assert model.name == "tiny"
    limits = model.device.limits
    assert (limits.max_model_len, limits.block_size, limits.max_num_seqs) == (100, 16, 64)
    assert limits.num_blocks == 64 * 7
    model.device.close()


def test_what_cannot_be_loaded_says_why(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.gguf"):
        LLM(tmp_path / "nowhere.gguf")
    with pytest.raises(ConfigError, match="max_model_len 100000 is above the model's limit"):
        LLM(directory, max_model_len=100000)
    broken = write_model(tmp_path / "broken", "llama")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(WeightsError, match=r"is missing|5 layers"):
        LLM(broken, **SMALL)


def test_weights_that_exceed_the_memory_are_refused_unread(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "available_memory", lambda: 1000)
    monkeypatch.setattr(SafetensorsSource, "digest", lambda _: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"weights take \d+ bytes; 1000 are available"):
        LLM(directory)


def test_a_bad_generation_config_is_named(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken", "llama")
    (broken / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": "hot"}')
    with pytest.raises(WeightsError, match=r"broken/generation_config\.json: temperature must be .* 'hot'"):
        LLM(broken, **SMALL)


def test_a_tokenizer_that_cannot_be_read_closes_the_device(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken", "llama")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        LLM(broken, **SMALL)


@pytest.mark.parametrize(
    ("file", "changes", "kind", "message"),
    [
        (
            "config.json",
            {"hidden_act": "relu"},
            models.ConfigError,
            r"/config\.json: hidden_act 'relu' is not",
        ),
        ("config.json", {"architectures": ["Odd"]}, models.ConfigError, r"/config\.json: architecture 'Odd'"),
        ("config.json", {"intermediate_size": 7}, WeightsError, ": the checkpoint does not fit its config"),
        ("generation_config.json", {"eos_token_id": "1"}, TokenizerError, ": eos_token_id is a token id"),
        ("tokenizer_config.json", {"chat_template": 1}, TokenizerError, ": chat_template is a template or"),
        ("tokenizer.json", {"model": 1}, TokenizerError, r"/tokenizer\.json is not a tokenizer"),
    ],
)
def test_what_is_wrong_names_the_checkpoint_once(
    tmp_path: Path, file: str, changes: dict[str, Any], kind: type[ValueError], message: str
) -> None:
    broken = write_model(tmp_path / "broken", "llama")
    values = json.loads((broken / file).read_text())
    (broken / file).write_text(json.dumps({**values, **changes}))
    with pytest.raises(kind, match="^" + re.escape(str(broken)) + message) as caught:
        LLM(broken, **SMALL)
    assert str(caught.value).count(str(broken)) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"llama.context_length": 1 << 30}, models.ConfigError, "max_position_embeddings is 1073741824, not"),
        ({"llama.feed_forward_length": 7}, WeightsError, "the checkpoint does not fit its config"),
        ({"tokenizer.ggml.model": "bert"}, TokenizerError, r"tokenizer\.ggml\.model 'bert' is not"),
    ],
)
def test_what_is_wrong_in_a_gguf_file_names_it_once(
    tmp_path: Path, changes: dict[str, Any], kind: type[ValueError], message: str
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", "llama", {**tiny_metadata("llama"), **changes}, tiny_tensors())
    with pytest.raises(kind, match="^" + re.escape(str(path)) + ": " + message) as caught:
        LLM(path, **SMALL)
    assert str(caught.value).count(str(path)) == 1
