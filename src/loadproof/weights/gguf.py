"""The GGUF container: header, metadata and tensor table, read in one pass over the memory-mapped file.

Layout (ggml's ``docs/gguf.md``), little endian: magic, version (2 or 3), number of tensors, number of
metadata pairs, the pairs, the tensor table, then the tensors' bytes, each at a multiple of the alignment.
Every count, length and offset is checked against the file's size before anything of that size is made, so
a hostile file costs memory in proportion to its own size. The ``gguf`` package's reader takes seconds for a
vocabulary of 49 thousand tokens; this one takes hundredths.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loadproof.weights.gguf_quants import TENSOR_TYPES, U8, TensorType
from loadproof.weights.tensors import WeightsError

MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_KEY_LENGTH = 65535
_MAX_NESTING = 4
_MIN_PAIR_BYTES = 8 + 4 + 1  # key length, value type, one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, one dimension, type, offset
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table: ``shape`` outermost first, ``nbytes`` bytes at ``start`` of the file."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file; ``data`` is the whole file, memory-mapped read-only.

    Metadata values are ``int``, ``float``, ``bool``, ``str``, numeric arrays as NumPy arrays and arrays of
    strings as ``list[str]``. Bytes of a string that are not UTF-8 become lone surrogates
    (``errors="surrogateescape"``), so ``s.encode("utf-8", "surrogateescape")`` gives the stored bytes.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: U8

    def raw(self, info: TensorInfo) -> U8:
        """A tensor's stored bytes, a view of the file."""
        return self.data[info.start : info.start + info.nbytes]


def open_gguf(path: Path) -> GgufFile:
    """Map ``path`` and read its header; raises :class:`WeightsError` for anything but a sound GGUF file."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise WeightsError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from error
    try:
        metadata, tensors = _read_header(_Cursor(mapped, 4))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    return GgufFile(path, metadata, tensors, np.frombuffer(mapped, np.uint8))


class _Cursor:
    """A position in the mapped file that only moves forward, never past its end."""

    def __init__(self, buffer: mmap.mmap, at: int) -> None:
        self.buffer, self.at, self.size = buffer, at, len(buffer)

    def take(self, count: int, what: str) -> int:
        """Step over ``count`` bytes and return where they begin."""
        if count > self.size - self.at:
            raise WeightsError(f"truncated: {what} of {count} bytes at byte {self.at} of {self.size}")
        start, self.at = self.at, self.at + count
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.buffer, self.take(8, what))[0])

    def count(self, what: str, smallest: int) -> int:
        """A number of items, each of at least ``smallest`` bytes, that the rest of the file can hold."""
        count = self.u64(f"the number of {what}")
        if count > (self.size - self.at) // smallest:
            raise WeightsError(f"{count} {what} cannot fit in the {self.size - self.at} bytes that follow")
        return count

    def text(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        return str(self.buffer[start : start + length], "utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        """A key: plain UTF-8 of bounded length."""
        name = self.text(what)
        if not 0 < len(name) <= _MAX_KEY_LENGTH or not name.isprintable():
            raise WeightsError(f"{what} {name[:40]!r} is not a printable name")
        return name

    def scalars(self, kind: int, count: int, what: str) -> npt.NDArray[Any]:
        """``count`` numbers, copied out of the file."""
        dtype = _SCALARS[kind]
        start = self.take(count * dtype.itemsize, what)
        if kind == _BOOL and np.frombuffer(self.buffer, np.uint8, count, start).max(initial=0) > 1:
            raise WeightsError(f"{what} holds a truth value that is neither 0 nor 1")
        return np.frombuffer(self.buffer, dtype, count, start).copy()


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    version = cursor.u32("the version")
    if version not in (2, 3):
        big_endian = version in (2 << 24, 3 << 24)
        raise WeightsError("big-endian GGUF" if big_endian else f"GGUF version {version}, not 2 or 3")
    num_tensors = cursor.count("tensors", _MIN_TENSOR_BYTES)
    metadata = _read_metadata(cursor)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise WeightsError(f"general.alignment {alignment!r} is not a power of two up to a million")
    split = metadata.get("split.count", 0)
    if type(split) is not int or split > 1:
        raise WeightsError("one of several split files; merge them first (llama-gguf-split --merge)")
    return metadata, _read_tensor_table(cursor, num_tensors, alignment)


def _read_metadata(cursor: _Cursor) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata pairs", _MIN_PAIR_BYTES)):
        key = cursor.name("metadata key")
        if key in metadata:
            raise WeightsError(f"metadata key {key} occurs twice")
        metadata[key] = _read_value(cursor, cursor.u32(f"the type of {key}"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.text(key)
    if kind == _ARRAY:
        return _read_array(cursor, key, 1)
    if kind not in _SCALARS:
        raise WeightsError(f"{key} has unknown value type {kind}")
    return cursor.scalars(kind, 1, key)[0].item()


def _read_array(cursor: _Cursor, key: str, depth: int) -> list[Any] | npt.NDArray[Any]:
    kind = cursor.u32(f"the element type of {key}")
    if kind == _STRING:
        return _read_strings(cursor, key)
    if kind == _ARRAY and depth < _MAX_NESTING:
        return [_read_array(cursor, key, depth + 1) for _ in range(cursor.count(f"arrays in {key}", 12))]
    if kind not in _SCALARS:
        raise WeightsError(f"{key} is an array of unknown element type {kind}")
    return cursor.scalars(kind, cursor.count(f"numbers in {key}", _SCALARS[kind].itemsize), key)


def _read_strings(cursor: _Cursor, key: str) -> list[str]:
    """A vocabulary has hundreds of thousands of strings: the one loop here that has to be lean."""
    count = cursor.count(f"strings in {key}", 8)
    buffer, at, size = cursor.buffer, cursor.at, cursor.size
    length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    for _ in range(count):
        start = at + 8
        if start > size or (at := start + length_at(buffer, start - 8)[0]) > size:
            raise WeightsError(f"truncated: string {len(strings)} of {key} reaches past byte {size}")
        strings.append(str(buffer[start:at], "utf-8", "surrogateescape"))
    cursor.at = at
    return strings


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    entries = [_read_tensor_entry(cursor, alignment) for _ in range(count)]
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    end, last = base, "the header"
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        nbytes = math.prod(shape) // kind.block_size * kind.block_bytes
        start = base + offset
        if name in tensors:
            raise WeightsError(f"tensor {name} occurs twice")
        if start < end:
            raise WeightsError(f"tensor {name} overlaps {last}")
        if start + nbytes > cursor.size:
            raise WeightsError(
                f"truncated: tensor {name} ends at byte {start + nbytes}, the file at {cursor.size}"
            )
        tensors[name] = TensorInfo(name, shape, kind, start, nbytes)
        end, last = start + nbytes, name
    return tensors


def _read_tensor_entry(cursor: _Cursor, alignment: int) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.name("tensor name")
    num_dims = cursor.u32(f"the number of dimensions of {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise WeightsError(f"tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    shape = tuple(reversed([cursor.u64(f"a dimension of {name}") for _ in range(num_dims)]))
    code = cursor.u32(f"the type of {name}")
    offset = cursor.u64(f"the offset of {name}")
    kind = TENSOR_TYPES.get(code)
    if kind is None:
        raise WeightsError(f"tensor {name} has type number {code}, which holds no weights known here")
    if 0 in shape or shape[-1] % kind.block_size:
        raise WeightsError(f"tensor {name} of shape {shape} is not made of {kind.name} blocks")
    if offset % alignment:
        raise WeightsError(f"tensor {name} is at offset {offset}, not a multiple of {alignment}")
    return name, shape, kind, offset
