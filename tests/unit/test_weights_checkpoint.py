from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.tiny_gguf import write_tiny

from loadproof.weights.checkpoint import open_checkpoint
from loadproof.weights.tensors import WeightsError

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}


def model_dir(
    tmp_path: Path, config: object = CONFIG, names: tuple[str, ...] = ("model.norm.weight",)
) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    tensors = {name: np.full(8, i, np.float32) for i, name in enumerate(names)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_directory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model_dir(tmp_path))
    assert (checkpoint.path, checkpoint.format, checkpoint.metadata) == (tmp_path, "safetensors", None)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {}
    assert checkpoint.tensors.shapes() == {"model.norm.weight": (8,)}


def test_generation_config(tmp_path: Path) -> None:
    model_dir(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"generation_config\.json: not a JSON object"):
        open_checkpoint(tmp_path)


def test_gguf_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", "qwen2"))
    assert (checkpoint.format, checkpoint.config["model_type"]) == ("gguf", "qwen2")
    assert checkpoint.metadata is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", "not a JSON object"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ({}, "model_type is not a string"),
        (CONFIG | {"model_type": ["llama"]}, "model_type is not a string"),
        (CONFIG | {"hidden_size": "8"}, "hidden_size = '8'"),
        (CONFIG | {"hidden_size": True}, "hidden_size = True"),
        (CONFIG | {"head_dim": 0}, "head_dim = 0"),
        (CONFIG | {"vocab_size": -5}, "vocab_size = -5"),
        (CONFIG | {"vocab_size": 1 << 40}, "vocab_size = 1099511627776"),
        (CONFIG | {"num_hidden_layers": 1_000_000}, "1000000 layers cannot be made of 1 tensors"),
        (CONFIG | {"text_config": 3}, "text_config is not an object"),
    ],
)
def test_config_of_a_wrong_kind(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        open_checkpoint(model_dir(tmp_path, config))
    assert "config.json" in str(caught.value)


def test_absent_numbers_are_left_to_the_model(tmp_path: Path) -> None:
    config = CONFIG | {"sliding_window": None}
    assert open_checkpoint(model_dir(tmp_path, config)).config == config


@pytest.mark.parametrize(
    "names",
    [
        ("language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x.weight"),
        ("model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x.weight"),
    ],
)
def test_text_part_of_a_multimodal_model(tmp_path: Path, names: tuple[str, ...]) -> None:
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "vision_config": {},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 8},
    }
    checkpoint = open_checkpoint(model_dir(tmp_path, config, names))
    assert checkpoint.config == {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 8,
        "eos_token_id": [1, 106],
    }
    assert set(checkpoint.tensors.shapes()) == {"model.norm.weight", "lm_head.weight"}
    np.testing.assert_array_equal(checkpoint.tensors.read("lm_head.weight"), np.full(8, 1, np.float32))


def test_text_config_with_plain_names(tmp_path: Path) -> None:
    config = CONFIG | {"text_config": {"model_type": "gemma3_text"}}
    assert set(open_checkpoint(model_dir(tmp_path, config)).tensors.shapes()) == {"model.norm.weight"}


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json$"):
        open_checkpoint(tmp_path)
    write_tiny(tmp_path / "m.gguf")
    with pytest.raises(WeightsError, match=r"name the file itself, such as .*m\.gguf"):
        open_checkpoint(tmp_path)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file"):
        open_checkpoint(tmp_path / "none")
