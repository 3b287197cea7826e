"""GGUF metadata to the ``config.json`` and ``generation_config.json`` of the same model in transformers.

Metadata that changes what the model computes in a way not representable here is refused, never ignored.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from loadproof.weights.gguf import GgufFile
from loadproof.weights.gguf_names import architecture
from loadproof.weights.tensors import WeightsError

CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_REFUSED = (  # metadata whose effect no graph here has
    "expert_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_length",
    "use_parallel_residual",
)
_MAX_COUNT = (1 << 31) - 1
_GEMMA3_PATTERN = 6  # five sliding layers, then a full one, where the file doesn't say
_GEMMA3_27B_LAYERS = 62  # the one size whose queries are scaled by its width over its heads
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192  # Llama 3.1 model card
ROPE_FREQS = "rope_freqs.weight"


def config_of(file: GgufFile) -> dict[str, Any]:
    """The transformers config of the model in ``file``, as ``config.json`` would hold it.

    Raises :class:`WeightsError` for an unknown architecture and for missing or contradictory metadata.
    """
    meta = _Metadata(file)
    config = _common(file, meta)
    if meta.arch == "gemma3":
        config |= _gemma3(meta, config)
    elif meta.arch == "llama" and (window := meta.positive("attention.sliding_window", None)):
        config |= {"model_type": "mistral", "sliding_window": window}
    config["architectures"] = [CLASS_NAMES[config["model_type"]]]
    return config


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """Default sampling and the tokens that end an answer (``eos``, and ``eot``, ``eom`` where given).

    Raises :class:`WeightsError` for sampling that is not numbers.
    """
    ids = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in ids if type(token) is int))
    config: dict[str, Any] = {}
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if type(bos := file.metadata.get("tokenizer.ggml.bos_token_id")) is int:
        config["bos_token_id"] = bos
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for stored, name in names.items():
        value = file.metadata.get(f"general.sampling.{stored}")
        if value is not None and not isinstance(value, int | float):
            raise WeightsError(f"general.sampling.{stored} is not a number")
        if value is not None and 0 <= value < 1e30:
            config[name] = value
    return config


class _Metadata:
    """Typed access to the keys under the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.arch = file.metadata.get("general.architecture")
        self.entry = architecture(self.arch)
        self.values = file.metadata

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.arch}.{key}")

    def positive(self, key: str, default: int | None) -> int | None:
        """A whole number above zero; ``default`` where the key is absent or 0."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one entry a layer, all the same
        if value is None:
            return default
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:
            raise WeightsError(f"{self.arch}.{key} is not one whole number up to {_MAX_COUNT}")
        return value or default

    def required(self, key: str) -> int:
        value = self.positive(key, None)
        if value is None:
            raise WeightsError(f"the metadata lacks {self.arch}.{key}")
        return value

    def real(self, key: str, default: float | None) -> float | None:
        """A finite number above zero; ``default`` where the key is absent or 0.

        A float32 becomes the shortest decimal that rounds to it: 1e-05, as ``config.json`` has it, not
        9.999999747378752e-06.
        """
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            raise WeightsError(f"{self.arch}.{key} is not a finite number, zero or above")
        single = np.float32(value)
        return (float(str(single)) if single == value else float(value)) or default


def _common(file: GgufFile, meta: _Metadata) -> dict[str, Any]:
    for key in _REFUSED:
        value = meta.get(key)
        if value is not None and (type(value) not in (int, float, bool) or value):
            raise WeightsError(f"{meta.arch}.{key} is set, which is not supported")
    causal = meta.get("attention.causal")
    if causal is not None and type(causal) is not bool:
        raise WeightsError(f"{meta.arch}.attention.causal is not true or false")
    if causal is False:
        raise WeightsError("the model is bidirectional (attention.causal is false), not a language model")
    heads, hidden = meta.required("attention.head_count"), meta.required("embedding_length")
    eps = meta.real("attention.layer_norm_rms_epsilon", None)
    if eps is None:
        raise WeightsError(f"the metadata lacks {meta.arch}.attention.layer_norm_rms_epsilon")
    activation = "hidden_activation" if meta.arch == "gemma3" else "hidden_act"
    config: dict[str, Any] = {
        "model_type": meta.entry.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": meta.required("feed_forward_length"),
        "num_hidden_layers": _num_layers(file, meta),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.positive("attention.head_count_kv", heads),
        "head_dim": _head_dim(meta, hidden, heads),
        activation: "gelu_pytorch_tanh" if meta.arch == "gemma3" else "silu",
        "max_position_embeddings": meta.required("context_length"),
        "rms_norm_eps": eps,
        "rope_theta": meta.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, meta),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return config | _special_tokens(file)


def _num_layers(file: GgufFile, meta: _Metadata) -> int:
    """The number of layers, no larger than the tensors allow: lists of that length follow."""
    layers = meta.required("block_count")
    if layers > len(file.tensors):
        raise WeightsError(f"{meta.arch}.block_count is {layers}, of {len(file.tensors)} tensors")
    if f"blk.{layers - 1}.attn_q.weight" not in file.tensors:
        raise WeightsError(
            f"{meta.arch}.block_count is {layers}, but layer {layers - 1} has no attn_q.weight"
        )
    return layers


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: the converter may have dropped rows that no token has."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError("the file has no token_embd.weight matrix")
    return embedding.shape[0]


def _special_tokens(file: GgufFile) -> dict[str, int]:
    found = {}
    for stored, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        value = file.metadata.get(f"tokenizer.ggml.{stored}_token_id")
        if type(value) is int:
            found[f"{name}_token_id"] = value
    return found


def _head_dim(meta: _Metadata, hidden: int, heads: int) -> int:
    head_dim = meta.positive("attention.key_length", hidden // heads)
    if not head_dim:
        raise WeightsError(f"{heads} heads do not fit a width of {hidden}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.positive(key, head_dim) != head_dim:
            raise WeightsError(f"{meta.arch}.{key} = {meta.get(key)} differs from the head's {head_dim}")
    return head_dim


def _rope_scaling(file: GgufFile, meta: _Metadata) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type")
    factor = meta.real("rope.scaling.factor", None) or meta.real("rope.scale_linear", None)  # its old name
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, meta)
    if kind is None or (isinstance(kind, str) and kind == "linear"):
        return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": factor}
    if not isinstance(kind, str) or kind != "none":
        raise WeightsError(f"rope scaling {str(kind)[:40]!r} is not supported; known are linear and llama3")
    return None


def _llama3_scaling(file: GgufFile, meta: _Metadata) -> dict[str, Any] | None:
    """The Llama 3 rope scaling whose divisors of each frequency are the file's ``rope_freqs.weight``."""
    info = file.tensors[ROPE_FREQS]
    head_dim = _head_dim(meta, meta.required("embedding_length"), meta.required("attention.head_count"))
    if info.shape != (head_dim // 2,) or info.kind.name != "F32":
        raise WeightsError(f"{ROPE_FREQS} is {info.kind.name} {info.shape}, not F32 ({head_dim // 2},)")
    stored = file.raw(info).view(np.float32).astype(np.float64)
    if (stored == 1).all():
        return None
    factor = float(stored.max())
    theta = meta.real("rope.freq_base", 10000.0)
    assert theta is not None
    if not np.allclose(stored, _llama3_divisors(head_dim, theta, factor), rtol=1e-5, atol=0):
        raise WeightsError(f"{ROPE_FREQS} does not follow Llama 3's rope scaling with its usual parameters")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> npt.NDArray[np.float64]:
    """What Llama 3 divides each of the ``head_dim / 2`` rotary frequencies by (Llama 3.1 model card)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT / wavelengths  # within the context of the first training
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _gemma3(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    window = meta.positive("attention.sliding_window", None)
    sliding = _sliding_layers(meta, layers) if window else [False] * layers
    wide = layers == _GEMMA3_27B_LAYERS
    return {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else head_dim,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "rope_theta": meta.real("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": meta.real("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", None),
        "final_logit_softcapping": meta.real("final_logit_softcapping", None),
    }


def _sliding_layers(meta: _Metadata, layers: int) -> list[bool]:
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or len(pattern) != layers:
            raise WeightsError("attention.sliding_window_pattern is not one truth value a layer")
        return [bool(local) for local in pattern]
    period = meta.positive("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    assert period is not None
    return [(layer + 1) % period != 0 for layer in range(layers)]
