from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf, write_tiny

from loadproof.weights.checkpoint import open_checkpoint
from loadproof.weights.gguf import open_gguf
from loadproof.weights.tensors import WeightsError

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
HUGE = 1 << 60


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return U64(len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + U32(kind) + value


def entry(name: str, dims: tuple[int, ...], code: int = 0, offset: int = 0) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(code) + U64(offset)


def container(
    pairs: list[bytes], entries: list[bytes], data: bytes = b"", *, version: int = 3, counts: Any = None
) -> bytes:
    num_tensors, num_pairs = counts or (len(entries), len(pairs))
    head = b"GGUF" + U32(version) + U64(num_tensors) + U64(num_pairs) + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % 32) + data


def opened(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return open_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_kind(tmp_path: Path, version: int) -> None:
    scalars = {
        0: "<B",
        1: "<b",
        2: "<H",
        3: "<h",
        4: "<I",
        5: "<i",
        6: "<f",
        7: "<?",
        10: "<Q",
        11: "<q",
        12: "<d",
    }
    pairs = [pair(f"s{kind}", kind, struct.pack(form, 1)) for kind, form in scalars.items()]
    pairs += [pair("text", STRING, text("gr\u00fcn")), pair("bytes", STRING, text(b"\xff\xfe"))]
    pairs += [
        pair(f"a{kind}", ARRAY, U32(kind) + U64(2) + struct.pack(form, 1) + struct.pack(form, 0))
        for kind, form in scalars.items()
    ]
    pairs += [pair("words", ARRAY, U32(STRING) + U64(3) + text("a") + text("") + text(b"\xc3"))]
    pairs += [pair("nested", ARRAY, U32(ARRAY) + U64(1) + U32(UINT32) + U64(1) + U32(7))]
    metadata = opened(tmp_path, container(pairs, [], version=version)).metadata
    for kind in scalars:
        assert metadata[f"s{kind}"] == 1
        assert metadata[f"a{kind}"].tolist() == [1, 0]
    assert type(metadata["s7"]) is bool
    assert type(metadata["s4"]) is int
    assert metadata["a7"].dtype == np.bool_
    assert metadata["text"] == "gr\u00fcn"
    assert metadata["bytes"].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert metadata["words"] == ["a", "", "\udcc3"]
    assert metadata["nested"][0].tolist() == [7]


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert {name: info.shape for name, info in ours.tensors.items()} == {
        tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in theirs.tensors
    }
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(
            ours.raw(ours.tensors[tensor.name]), tensor.data.view(np.uint8).reshape(-1)
        )
    for key, value in ours.metadata.items():
        stored = theirs.fields[key].contents()
        assert stored == value
    assert len(ours.metadata) == len(theirs.fields) - 3  # the package adds the header's three counts
    del theirs


def test_alignment_is_obeyed(tmp_path: Path) -> None:
    head = container([pair("general.alignment", UINT32, U32(256))], [entry("x", (4,))])
    file = opened(tmp_path, head + bytes(-len(head) % 256) + np.arange(4, dtype="<f4").tobytes())
    assert file.tensors["x"].start % 256 == 0
    assert file.raw(file.tensors["x"]).view(np.float32).tolist() == [0, 1, 2, 3]


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("not a GGUF file", lambda: b""),
    "other": ("not a GGUF file", lambda: b"PK\x03\x04" + bytes(64)),
    "magic only": ("truncated", lambda: b"GGUF"),
    "version 1": ("version 1", lambda: container([], [], version=1)),
    "big endian": ("big-endian", lambda: container([], [], version=3 << 24)),
    "tensor count": ("cannot fit", lambda: container([], [], counts=(HUGE, 0))),
    "pair count": ("cannot fit", lambda: container([], [], counts=(0, HUGE))),
    "pair count of the file": (
        "is not a printable name",
        lambda: container([pair("k", UINT32, U32(1))], [], counts=(0, 2)) + bytes(4),
    ),
    "key length": ("truncated", lambda: container([U64(HUGE) + bytes(64)], [])),
    "key that is no name": ("printable", lambda: container([pair("a\nb", UINT32, U32(1))], [])),
    "string length": ("truncated", lambda: container([pair("k", STRING, U64(HUGE))], [])),
    "string length of 2**64": ("truncated", lambda: container([pair("k", STRING, U64((1 << 64) - 1))], [])),
    "value type": ("unknown value type 99", lambda: container([pair("k", 99, U64(0))], [])),
    "array type": ("unknown element type 99", lambda: container([pair("k", ARRAY, U32(99) + U64(0))], [])),
    "array count": ("cannot fit", lambda: container([pair("k", ARRAY, U32(UINT32) + U64(HUGE))], [])),
    "strings count": ("cannot fit", lambda: container([pair("k", ARRAY, U32(STRING) + U64(HUGE))], [])),
    "strings overrun": (
        "truncated",
        lambda: container([pair("k", ARRAY, U32(STRING) + U64(1) + U64(999))], []),
    ),
    "deep nesting": ("element type 9", lambda: container([pair("k", ARRAY, (U32(ARRAY) + U64(1)) * 50)], [])),
    "truth value": ("neither 0 nor 1", lambda: container([pair("k", BOOL, b"\x02")], [])),
    "key twice": ("occurs twice", lambda: container([pair("k", UINT32, U32(1))] * 2, [])),
    "alignment 0": ("power of two", lambda: container([pair("general.alignment", UINT32, U32(0))], [])),
    "alignment 24": ("power of two", lambda: container([pair("general.alignment", UINT32, U32(24))], [])),
    "alignment text": ("power of two", lambda: container([pair("general.alignment", STRING, text("x"))], [])),
    "split": ("merge", lambda: container([pair("split.count", UINT32, U32(3))], [])),
    "split list": ("merge", lambda: container([pair("split.count", ARRAY, U32(UINT32) + U64(0))], [])),
    "no dimensions": ("0 dimensions", lambda: container([], [entry("x", ())])),
    "many dimensions": ("9 dimensions", lambda: container([], [entry("x", (1,) * 9)])),
    "dimension 0": ("not made of F32 blocks", lambda: container([], [entry("x", (4, 0))])),
    "shape overflow": ("truncated", lambda: container([], [entry("x", (1 << 32, 1 << 32, 4))], bytes(64))),
    "part of a block": ("not made of Q4_0 blocks", lambda: container([], [entry("x", (33,), 2)], bytes(64))),
    "tensor type": ("type number 77", lambda: container([], [entry("x", (4,), 77)], bytes(64))),
    "integer tensor": ("type number 26", lambda: container([], [entry("x", (4,), 26)], bytes(64))),
    "offset": ("truncated", lambda: container([], [entry("x", (4,), 0, 1 << 40)], bytes(64))),
    "offset off by 8": ("multiple of 32", lambda: container([], [entry("x", (4,), 0, 8)], bytes(64))),
    "last byte cut": ("truncated", lambda: container([], [entry("x", (4,))], bytes(15))),
    "overlap": ("overlaps x", lambda: container([], [entry("x", (16,)), entry("y", (4,), 0, 32)], bytes(64))),
    "same tensor twice": (
        "occurs twice",
        lambda: container([], [entry("x", (4,)), entry("x", (4,), 0, 32)], bytes(64)),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_before_memory_is_taken(tmp_path: Path, case: str) -> None:
    message, content = HOSTILE[case]
    path = tmp_path / "file.gguf"
    path.write_bytes(content())
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=message) as caught:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(WeightsError, match=str(path)):
            open_gguf(path)


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("sound")
    gemma = {f"blk.{i}.post_ffw_norm.weight": np.ones(32, np.float32) for i in range(2)}
    divisors = {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)}
    files = [
        write_tiny(folder / "a.gguf", attention__key_length=8, rope__dimension_count=8),
        write_gguf(
            folder / "b.gguf",
            "gemma3",
            tiny_metadata("gemma3") | {"gemma3.attention.sliding_window": 16},
            tiny_tensors() | gemma,
        ),
        write_gguf(folder / "c.gguf", "llama", tiny_metadata("llama"), tiny_tensors() | divisors),
    ]
    return [path.read_bytes() for path in files]


def opens_or_is_refused(path: Path, content: bytes) -> None:
    """Only :class:`WeightsError`, and never much more memory than the file has bytes."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors.shapes():
            checkpoint.tensors.read_bf16(name)
    except WeightsError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (1 << 20) + 16 * len(content)


fuzzed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzzed
@given(
    which=st.integers(0, 2),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=6),
)
def test_flipped_bits(
    sound_files: list[bytes], tmp_path: Path, which: int, flips: list[tuple[float, int]]
) -> None:
    content = bytearray(sound_files[which])
    header = content.index(b"blk.1.ffn_down.weight") + 64  # past it are only weights
    for place, bit in flips:
        content[4 + int(place * header)] ^= 1 << bit
    opens_or_is_refused(tmp_path / "fuzz.gguf", bytes(content))


@fuzzed
@given(
    which=st.integers(0, 2),
    place=st.floats(0, 1),
    word=st.sampled_from([0, 1, 255, (1 << 32) - 1, HUGE, (1 << 64) - 1]),
)
def test_overwritten_words(
    sound_files: list[bytes], tmp_path: Path, which: int, place: float, word: int
) -> None:
    content = bytearray(sound_files[which])
    header = content.index(b"blk.1.ffn_down.weight") + 64
    at = int(place * header)
    content[at : at + 8] = U64(word)
    opens_or_is_refused(tmp_path / "fuzz.gguf", bytes(content))


@fuzzed
@given(which=st.integers(0, 2), share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere(sound_files: list[bytes], tmp_path: Path, which: int, share: float) -> None:
    content = sound_files[which]
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(share * (len(content) - 32))])  # the writer pads the end by up to 31
    with pytest.raises(WeightsError):
        open_gguf(path)
