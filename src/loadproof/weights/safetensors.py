"""Safetensors checkpoints in the Hugging Face layout: one file, or shards with an index.

A file is 8 bytes of header length, a JSON header giving each tensor's type, shape and byte range, and the
bytes (format: huggingface/safetensors README). The header is read here rather than by the safetensors
package so that tensors are views of the memory-mapped file instead of copies, and so that every fault has
a message of ours. Nothing in the header is believed before it is checked against the file's size.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loadproof.weights.chunks import rounded_bf16, tree_digest
from loadproof.weights.tensors import BF16, Array, WeightsError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_DIMS = 8
_ITEM_BYTES = {
    name: size
    for size, names in {
        1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
        2: ("U16", "I16", "F16", "BF16"),
        4: ("U32", "I32", "F32"),
        8: ("U64", "I64", "F64", "C64"),
    }.items()
    for name in names
}
_WEIGHT_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class StoredTensor:
    """One header entry; its bytes are ``data[start:stop]`` of the shard's mapped file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: npt.NDArray[np.uint8]


class SafetensorsSource:
    """A :class:`~loadproof.weights.tensors.TensorSource` over ``model.safetensors`` or its shards.

    Reads headers only; raises :class:`WeightsError` for anything missing, truncated or inconsistent. bf16,
    f16 and f32 tensors can be read. Others may be present (old checkpoints carry integer buffers); reading
    one raises: float64 would have to be rounded, and quantised formats need more than their values.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if (directory / SINGLE).is_file():
            self._tensors = _open_shard(directory / SINGLE)
        elif (directory / INDEX).is_file():
            self._tensors = _open_indexed(directory)
        else:
            raise WeightsError(_nothing_found(directory))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Array:
        """One tensor: a read-only view of the file for bf16 and f32, a widened copy for f16."""
        values = self._view(name)
        return values.astype(np.float32) if values.dtype == np.float16 else values

    def read_bf16(self, name: str) -> BF16:
        """One tensor in bfloat16: a view where it is stored so, else rounded to nearest even."""
        values = self._view(name)
        return values if values.dtype == ml_dtypes.bfloat16 else rounded_bf16(values)

    def digest(self) -> str:
        """SHA-256 hex digest over the shards' bytes in order of name (:func:`~.chunks.tree_digest`)."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        shards = {id(tensor.data): tensor.data for tensor in self._tensors.values()}
        return tree_digest(data.data for data in shards.values())

    def _view(self, name: str) -> npt.NDArray[Any]:
        if name not in self._tensors:
            raise WeightsError(f"{self._directory} has no tensor {name}")
        tensor = self._tensors[name]
        dtype = _WEIGHT_DTYPES.get(tensor.dtype)
        if dtype is None:
            known = ", ".join(_WEIGHT_DTYPES)
            raise WeightsError(f"tensor {name} is stored as {tensor.dtype}; weights are read from {known}")
        # Headers may leave tensors unaligned; NumPy reads those a little slower, without a copy.
        return np.ndarray(tensor.shape, dtype, buffer=tensor.data.data, offset=tensor.start)


def _nothing_found(directory: Path) -> str:
    message = f"{directory} has neither {SINGLE} nor {INDEX}"
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        message += f"; {pickles[0]} is a pickle, which can run code: convert it to safetensors"
    return message


def _open_indexed(directory: Path) -> dict[str, StoredTensor]:
    index = read_json(directory / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{directory / INDEX}: weight_map is not an object that names shards")
    for name, shard in weight_map.items():
        # A plain file name; the file itself may be a link, as in the hub's cache.
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise WeightsError(f"{directory / INDEX}: {name} is in {shard!r}, not a file of the directory")
    shards = {shard: _open_shard(directory / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise WeightsError(f"{directory / shard} lacks {name}, which {INDEX} says it holds")
    return {name: shards[shard][name] for name, shard in sorted(weight_map.items(), key=lambda kv: kv[1])}


def _is_plain_name(name: str) -> bool:
    return Path(name).name == name and name not in ("", "..") and "\\" not in name and "\0" not in name


def _open_shard(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            size = file.seek(0, 2)
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER):
                raise WeightsError(f"{path}: truncated, or no safetensors file: {size} bytes")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from error
    header = _parse_json(path, data[8 : 8 + header_bytes].tobytes())
    try:
        return _read_header(header, data, 8 + header_bytes)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _read_header(header: dict[str, Any], data: npt.NDArray[np.uint8], base: int) -> dict[str, StoredTensor]:
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(name, entry, data, base) for name, entry in header.items()}
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda kv: (kv[1].start, kv[1].stop)):
        if tensor.start != end:
            raise WeightsError(f"tensor {name} begins at byte {tensor.start}, the one before ends at {end}")
        end = tensor.stop
    if end != len(data):
        kind = "truncated" if end > len(data) else "unused bytes"
        raise WeightsError(f"{kind}: tensors end at byte {end}, the file at {len(data)}")
    return tensors


def _read_entry(name: str, entry: Any, data: npt.NDArray[np.uint8], base: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise WeightsError(f"the header's entry for {name} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise WeightsError(f"tensor {name} has unknown dtype {dtype!r}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise WeightsError(f"tensor {name} has no valid shape")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"tensor {name} has no valid data_offsets")
    start, stop = offsets
    if math.prod(shape) * _ITEM_BYTES[dtype] != stop - start:
        raise WeightsError(f"tensor {name} of shape {shape} in {dtype} is not the {stop - start} bytes given")
    return StoredTensor(dtype, tuple(shape), base + start, base + stop, data)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of whole numbers, none negative, each below 2**63."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises :class:`WeightsError` where it is missing or is none."""
    try:
        if path.stat().st_size > _MAX_HEADER:
            raise WeightsError(f"{path}: too large to be a description of a model")
        text = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from error
    return _parse_json(path, text)


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique_object)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found
