"""Small GGUF files for tests, written with the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 32, 4, 2, 8, 64, 48, 2


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], **types: int
) -> Path:
    """Write ``tensors`` (raw bytes where ``types`` gives the ggml type of that name) and ``metadata``."""
    writer = gguf.GGUFWriter(path, arch)
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        adders[type(value)](key, value)
    for name, tensor in tensors.items():
        raw_type = gguf.GGMLQuantizationType(types[name]) if name in types else None
        writer.add_tensor(name, tensor, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_metadata(arch: str) -> dict[str, Any]:
    """The metadata that every architecture here needs."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tiny_tensors(seed: int = 0) -> dict[str, F32]:
    """Random tensors of a llama-like model under their GGUF names."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny(path: Path, arch: str = "llama", **metadata: Any) -> Path:
    """A whole tiny model; keyword ``a__b=v`` sets the metadata ``{arch}.a.b``."""
    extra = {f"{arch}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return write_gguf(path, arch, tiny_metadata(arch) | extra, tiny_tensors())
