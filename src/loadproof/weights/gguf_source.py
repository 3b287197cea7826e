"""Tensors of a GGUF file under their Hugging Face names, with the converter's changes undone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from loadproof.weights.chunks import rounded_bf16, tree_digest
from loadproof.weights.gguf import GgufFile, TensorInfo
from loadproof.weights.gguf_config import ROPE_FREQS
from loadproof.weights.gguf_names import architecture
from loadproof.weights.gguf_quants import U8, dequantize, dequantize_bf16
from loadproof.weights.tensors import BF16, Array, WeightsError


@dataclass(frozen=True)
class _Entry:
    """A tensor as it has to be read: ``heads`` whose rotary pairs are taken apart, ``offset`` subtracted."""

    info: TensorInfo
    heads: int = 0
    offset: float = 0.0


class GgufSource:
    """A :class:`~loadproof.weights.tensors.TensorSource` over an open GGUF file.

    ``config`` is the transformers config of the same file. Raises :class:`WeightsError` for a tensor that
    has no place in the architecture. Reading is safe from several threads.
    """

    def __init__(self, file: GgufFile, config: dict[str, int]) -> None:
        self._file = file
        self._entries = dict(_entries(file, config["num_attention_heads"], config["num_key_value_heads"]))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face name."""
        return {name: entry.info.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Array:
        """One tensor: bfloat16 where it is stored so, else float32 (see the protocol)."""
        entry = self._entry(name)
        values = dequantize(self._raw(entry), entry.info.kind, entry.info.shape)
        return values.astype(np.float32) - np.float32(entry.offset) if entry.offset else values

    def read_bf16(self, name: str) -> BF16:
        """One tensor in bfloat16, rounded to nearest even."""
        entry = self._entry(name)
        if entry.offset:
            return rounded_bf16(self.read(name))
        return dequantize_bf16(self._raw(entry), entry.info.kind, entry.info.shape)

    def digest(self) -> str:
        """SHA-256 hex digest over the whole file, in pieces (:func:`~.chunks.tree_digest`)."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return tree_digest([self._file.data.data])

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise WeightsError(f"{self._file.path} has no tensor {name}")
        return self._entries[name]

    def _raw(self, entry: _Entry) -> U8:
        raw = self._file.raw(entry.info)
        if not entry.heads:
            return raw
        # Row 2 i + p of a head goes back to row p * head_dim / 2 + i; moving whole stored rows keeps blocks.
        rows = raw.reshape(entry.heads, entry.info.shape[0] // entry.heads // 2, 2, -1)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _entries(file: GgufFile, num_heads: int, num_kv_heads: int) -> list[tuple[str, _Entry]]:
    arch = architecture(file.metadata.get("general.architecture"))
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if arch.interleaved_rope else {}
    found = []
    for name, info in file.tensors.items():
        if name == ROPE_FREQS:
            continue  # it has become the config's rope_scaling
        full_name = arch.hugging_face_name(name)
        offset = arch.norm_offset if name.endswith("norm.weight") else 0.0
        entry = _Entry(info, heads.get(name.split(".")[-2], 0), offset)
        if entry.heads and not _rows_split(info, entry.heads):
            raise WeightsError(
                f"tensor {name} of shape {info.shape} does not divide into {entry.heads} heads"
            )
        found.append((full_name, entry))
    return found


def _rows_split(info: TensorInfo, heads: int) -> bool:
    """Whether the first dimension is pairs of whole stored rows for every head."""
    return info.shape[0] % (2 * heads) == 0 and (len(info.shape) > 1 or info.kind.block_size == 1)
