from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    tiny_metadata,
    tiny_tensors,
    write_gguf,
)

from loadproof.weights.checkpoint import Checkpoint, open_checkpoint
from loadproof.weights.tensors import WeightsError


def opened(
    tmp_path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any] | None = None
) -> Checkpoint:
    """A tiny model with more metadata: keys are put under the architecture's name; None removes one."""
    values = tiny_metadata(arch) | {
        key if key.startswith(("general.", "tokenizer.")) else f"{arch}.{key}": value
        for key, value in metadata.items()
    }
    kept = {key: value for key, value in values.items() if value is not None}
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, kept, tiny_tensors() | (tensors or {})))


def test_llama_config(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, "llama", {"rope.dimension_count": HEAD_DIM, "vocab_size": VOCAB})
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.format == "gguf"
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert checkpoint.metadata is not None
    assert checkpoint.metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]


def test_config_follows_the_tensors(tmp_path: Path) -> None:
    more = {f"blk.{i}.attn_q.bias": np.zeros(HEADS * HEAD_DIM, np.float32) for i in range(LAYERS)}
    more["output.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
    config = opened(tmp_path, "llama", {}, more).config
    assert (config["attention_bias"], config["tie_word_embeddings"]) == (True, False)


def test_defaults_of_absent_metadata(tmp_path: Path) -> None:
    config = opened(tmp_path, "qwen2", {"attention.head_count_kv": None, "rope.freq_base": None}).config
    assert config["num_key_value_heads"] == HEADS
    assert config["rope_theta"] == 10000.0
    assert config["architectures"] == ["Qwen2ForCausalLM"]


def test_head_dim_from_key_length(tmp_path: Path) -> None:
    metadata = {"attention.key_length": 16, "attention.value_length": 16}
    assert opened(tmp_path, "qwen3", metadata).config["head_dim"] == 16


def test_sliding_window_of_a_llama_is_a_mistral(tmp_path: Path) -> None:
    config = opened(tmp_path, "llama", {"attention.sliding_window": 64}).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)
    assert config["architectures"] == ["MistralForCausalLM"]


def test_equal_entries_a_layer_are_one_number(tmp_path: Path) -> None:
    assert opened(tmp_path, "llama", {"attention.head_count_kv": [2, 2]}).config["num_key_value_heads"] == 2


def test_gemma3_config(tmp_path: Path) -> None:
    metadata = {"attention.sliding_window": 64, "attention.key_length": 8, "final_logit_softcapping": 30.0}
    config = opened(tmp_path, "gemma3", metadata | {"rope.freq_base": 1e6}).config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["query_pre_attn_scalar"] == 8
    assert config["sliding_window"] == 64
    assert config["layer_types"] == ["sliding_attention"] * LAYERS  # the sixth would be full
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (None, 30.0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(2, ["sliding_attention", "full_attention"]), ([False, True], ["full_attention", "sliding_attention"])],
)
def test_gemma3_window_pattern(tmp_path: Path, pattern: object, expected: list[str]) -> None:
    metadata = {"attention.sliding_window": 64, "attention.sliding_window_pattern": pattern}
    assert opened(tmp_path, "gemma3", metadata).config["layer_types"] == expected


def test_gemma3_without_window_is_full(tmp_path: Path) -> None:
    config = opened(tmp_path, "gemma3", {}).config
    assert (config["sliding_window"], set(config["layer_types"])) == (None, {"full_attention"})


def test_linear_rope_scaling(tmp_path: Path) -> None:
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert opened(tmp_path, "gemma3", metadata).config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 8.0,
    }
    assert opened(tmp_path, "llama", {"rope.scale_linear": 2.0}).config["rope_scaling"]["factor"] == 2.0
    assert opened(tmp_path, "llama", metadata | {"rope.scaling.type": "none"}).config["rope_scaling"] is None


def llama3_divisors(
    theta: float, factor: float, context: int = 8192
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As the converter computes them, in float32, one frequency after the other."""
    divisors: list[float] = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi / float(np.float32(1 / theta ** (i / HEAD_DIM)))
        if wavelength < context / 4:
            divisors.append(1.0)
        elif wavelength > context:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_rope_factors_become_rope_scaling(tmp_path: Path) -> None:
    divisors = llama3_divisors(500_000.0, 32.0)
    assert set(divisors) - {1.0, 32.0}, "the blended part should be tested too"
    metadata = {"rope.freq_base": 500_000.0}
    checkpoint = opened(tmp_path, "llama", metadata, {"rope_freqs.weight": divisors})
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensors.shapes())


def test_rope_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    assert opened(tmp_path, "llama", {}, ones).config["rope_scaling"] is None


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        (llama3_divisors(500_000.0, 32.0, context=16384), "does not follow"),
        (np.full(4, np.nan, np.float32), "does not follow"),
        (np.ones(5, np.float32), r"not F32 \(4,\)"),
    ],
)
def test_other_rope_factors_are_refused(tmp_path: Path, divisors: object, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        opened(tmp_path, "llama", {"rope.freq_base": 500_000.0}, {"rope_freqs.weight": divisors})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layers": ("llama", {"block_count": None}, "lacks llama.block_count"),
    "zero layers": ("llama", {"block_count": 0}, "lacks llama.block_count"),
    "layers without tensors": ("gemma3", {"block_count": 4_000_000_000}, "one whole number"),
    "a layer too many": ("llama", {"block_count": 3}, "layer 2 has no"),
    "more layers than tensors": ("gemma3", {"block_count": 2_000_000_000}, "block_count is 2000000000, of"),
    "width of text": ("llama", {"embedding_length": "32"}, "one whole number"),
    "unequal head counts": ("llama", {"attention.head_count_kv": [1, 2]}, "one whole number"),
    "no epsilon": ("llama", {"attention.layer_norm_rms_epsilon": None}, "rms_epsilon"),
    "base of no number": ("llama", {"rope.freq_base": math.nan}, "finite"),
    "negative base": ("llama", {"rope.freq_base": -1.0}, "finite"),
    "experts": ("llama", {"expert_count": 8}, "expert_count is set"),
    "expert array": ("llama", {"expert_count": [8, 8]}, "expert_count is set"),
    "logit scale": ("llama", {"logit_scale": 2.0}, "logit_scale is set"),
    "causal by number": ("gemma3", {"attention.causal": 0}, "causal is not true or false"),
    "causal by layer": ("gemma3", {"attention.causal": [True, False]}, "causal is not true or false"),
    "bidirectional": ("gemma3", {"attention.causal": False}, "bidirectional"),
    "partial rotary": ("llama", {"rope.dimension_count": 4}, "differs"),
    "other value length": ("qwen3", {"attention.key_length": 8, "attention.value_length": 4}, "differs"),
    "yarn": ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "'yarn' is not supported"),
    "scaling type of numbers": ("qwen2", {"rope.scaling.type": [1, 2]}, "is not supported"),
    "more heads than width": ("llama", {"attention.head_count": 64}, "do not fit"),
    "short pattern": (
        "gemma3",
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
        "one truth value a layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_cannot_be_honoured_is_refused(tmp_path: Path, case: str) -> None:
    arch, metadata, message = REFUSED[case]
    with pytest.raises(WeightsError, match=message) as caught:
        opened(tmp_path, arch, metadata)
    assert "m.gguf" in str(caught.value)


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'mamba' is unknown; known are llama, qwen2, qwen3, gemma3"):
        opened(tmp_path, "mamba", {})


def test_no_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if name != "token_embd.weight"}
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_metadata("llama"), tensors)
    with pytest.raises(WeightsError, match=r"no token_embd\.weight"):
        open_checkpoint(path)


def test_generation_config_has_every_end_and_the_sampling(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    found = opened(tmp_path, "llama", metadata).generation_config
    assert found == {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.5, "top_k": 20}
