from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from loadproof.graph import Param
from loadproof.weights.chunks import CHUNK
from loadproof.weights.safetensors import SafetensorsSource
from loadproof.weights.tensors import RenamedSource, WeightsError, check_params

Tensors = dict[str, npt.NDArray[Any]]


def some_tensors() -> Tensors:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((5, 7)).astype(np.float32)
    return {
        "a.f32": values,
        "b.f16": values.astype(np.float16),
        "c.bf16": values.astype(ml_dtypes.bfloat16),
        "d.i64": np.arange(4),
        "e.f64": np.ones(2),
        "f.scalar": np.array(2, np.float32),
    }


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def source_of(tmp_path: Path, content: bytes) -> SafetensorsSource:
    (tmp_path / "model.safetensors").write_bytes(content)
    return SafetensorsSource(tmp_path)


def sharded(tmp_path: Path, weight_map: dict[str, object] | None = None) -> Path:
    tensors = {name: tensor for name, tensor in some_tensors().items() if name < "d"}
    save_file({"a.f32": tensors["a.f32"]}, tmp_path / "model-1.safetensors")
    save_file({name: tensors[name] for name in ("b.f16", "c.bf16")}, tmp_path / "model-2.safetensors")
    places = {"a.f32": "model-1.safetensors", "b.f16": "model-2.safetensors", "c.bf16": "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": places if weight_map is None else weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = some_tensors()
    source = source_of(tmp_path, save(tensors, metadata={"format": "pt"}))
    assert source.shapes() == {name: tensor.shape for name, tensor in tensors.items()}
    for name, dtype in {
        "a.f32": np.float32,
        "b.f16": np.float32,
        "c.bf16": ml_dtypes.bfloat16,
        "f.scalar": np.float32,
    }.items():
        found = source.read(name)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, tensors[name].astype(dtype))
        rounded = source.read_bf16(name)
        assert rounded.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(rounded, tensors[name].astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_views_of_the_file_are_not_copied(tmp_path: Path, dtype: Any) -> None:
    big = np.zeros(1 << 20, dtype)
    source = source_of(tmp_path, save({"big": big}))
    tracemalloc.start()
    try:
        found = source.read("big")
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
    assert found.shape == big.shape
    assert not found.flags.writeable


def test_large_tensors_are_rounded_in_every_chunk(tmp_path: Path) -> None:
    values = np.random.default_rng(4).standard_normal(5 * CHUNK + 3).astype(np.float32)
    values[7] = np.nan
    source = source_of(tmp_path, save({"x": values}))
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(source.read_bf16("x").view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("name", ["d.i64", "e.f64"])
def test_other_dtypes_are_listed_but_not_read(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, save(some_tensors()))
    assert name in source.shapes()
    for read in (source.read, source.read_bf16):
        with pytest.raises(
            WeightsError, match=f"{name} is stored as .64; weights are read from BF16, F16, F32"
        ):
            read(name)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["x"] = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    source = source_of(tmp_path, file_of(header, b"\0" + np.array([1, 2], "<f4").tobytes()))
    assert source.read("x").tolist() == [1, 2]
    assert source.read_bf16("x").astype(np.float32).tolist() == [1, 2]


def test_shards(tmp_path: Path) -> None:
    source = SafetensorsSource(sharded(tmp_path))
    tensors = some_tensors()
    assert sorted(source.shapes()) == ["a.f32", "b.f16", "c.bf16"]
    for name in source.shapes():
        np.testing.assert_array_equal(source.read(name).astype(np.float32), tensors[name].astype(np.float32))


def test_shards_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    sharded(snapshot)
    for shard in list(snapshot.glob("model-*.safetensors")):
        shard.rename(blobs / shard.name)
        shard.symlink_to(blobs / shard.name)
    assert len(SafetensorsSource(snapshot).shapes()) == 3


@pytest.mark.parametrize(
    "place", ["../model-1.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", "", "..", "a\0b", 3]
)
def test_index_that_leaves_the_directory(tmp_path: Path, place: object) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(some_tensors(), tmp_path / "model-1.safetensors")
    sharded(directory, {"a.f32": place})
    with pytest.raises(WeightsError, match=r"a\.f32 is in .*not a file of the directory"):
        SafetensorsSource(directory)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.f32": "model-9.safetensors"}, r"model-9\.safetensors: No such file"),
        ({"zzz": "model-1.safetensors"}, r"model-1\.safetensors lacks zzz"),
        ({}, "weight_map is not an object"),
    ],
)
def test_index_that_does_not_fit(tmp_path: Path, weight_map: dict[str, object], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        SafetensorsSource(sharded(tmp_path, weight_map))


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', "[" * 100_000, "\x00\xff"])
def test_index_that_is_no_index(tmp_path: Path, text: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json"):
        SafetensorsSource(tmp_path)


def one(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


HUGE = 1 << 62
HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("truncated, or no safetensors", lambda: b""),
    "short": ("truncated, or no safetensors", lambda: b"\x01\x00"),
    "header length": ("truncated, or no safetensors", lambda: file_of(one(), bytes(16), length=1 << 63)),
    "header longer than the file": ("truncated", lambda: file_of(one(), length=10_000)),
    "not JSON": ("not valid JSON", lambda: file_of(b"{nope}")),
    "not UTF-8": ("not valid JSON", lambda: file_of(b'{"\xff": 1}')),
    "deep JSON": ("not valid JSON", lambda: file_of(b'{"x":' + b"[" * 200_000)),
    "huge number": ("not valid JSON", lambda: file_of(b'{"x": ' + b"9" * 10_000 + b"}")),
    "key twice": ("not valid JSON", lambda: file_of(b'{"x": {}, "x": {}}')),
    "a list": ("not a JSON object", lambda: file_of([])),
    "entry": ("not an object", lambda: file_of({"x": 3})),
    "dtype": ("unknown dtype", lambda: file_of(one(dtype="F31"), bytes(16))),
    "dtype of a list": ("unknown dtype", lambda: file_of(one(dtype=["F32"]), bytes(16))),
    "negative dimension": ("no valid shape", lambda: file_of(one(shape=[-2, -2]), bytes(16))),
    "fraction of a dimension": ("no valid shape", lambda: file_of(one(shape=[2.0, 2]), bytes(16))),
    "many dimensions": ("no valid shape", lambda: file_of(one(shape=[1] * 64 + [4]), bytes(16))),
    "no shape": ("no valid shape", lambda: file_of(one(shape=None), bytes(16))),
    "shape overflow": ("is not the 16 bytes", lambda: file_of(one(shape=[HUGE, HUGE]), bytes(16))),
    "offsets backwards": ("no valid data_offsets", lambda: file_of(one(data_offsets=[16, 0]), bytes(16))),
    "three offsets": ("no valid data_offsets", lambda: file_of(one(data_offsets=[0, 16, 16]), bytes(16))),
    "offset of true": ("no valid data_offsets", lambda: file_of(one(data_offsets=[False, 16]), bytes(16))),
    "offset past the end": ("truncated", lambda: file_of(one(), bytes(15))),
    "hole": ("begins at byte", lambda: file_of(one(data_offsets=[4, 20]), bytes(20))),
    "bytes left over": ("unused bytes", lambda: file_of(one(), bytes(17))),
    "overlap": (
        "begins at byte",
        lambda: file_of(one() | {"y": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}, bytes(20)),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, case: str) -> None:
    message, content = HOSTILE[case]
    with pytest.raises(WeightsError, match=message) as caught:
        source_of(tmp_path, content())
    assert str(tmp_path / "model.safetensors") in str(caught.value)


fuzzed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SOUND = save(some_tensors())
HEADER = SOUND.index(b"}}") + 2


@fuzzed
@given(flips=st.lists(st.tuples(st.integers(0, HEADER), st.integers(0, 7)), min_size=1, max_size=5))
def test_flipped_bits(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(SOUND)
    for place, bit in flips:
        content[place] ^= 1 << bit
    try:
        source = source_of(tmp_path, bytes(content))
        for name in source.shapes():
            source.read(name)
    except WeightsError:
        pass


@fuzzed
@given(size=st.integers(0, len(SOUND) - 1))
def test_truncated_anywhere(tmp_path: Path, size: int) -> None:
    with pytest.raises(WeightsError):
        source_of(tmp_path, SOUND[:size])


def test_nothing_there_and_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"
    ):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is a pickle"):
        SafetensorsSource(tmp_path)


def test_digest_follows_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    digests = []
    for number, change in enumerate((0, 0, 1)):
        directory = tmp_path / str(number)
        directory.mkdir()
        content = bytearray(SOUND)
        content[-1] ^= change
        digests.append(source_of(directory, bytes(content)).digest())
    assert digests[0] == digests[1] != digests[2]


def test_absent_tensor(tmp_path: Path) -> None:
    source = source_of(tmp_path, SOUND)
    with pytest.raises(WeightsError, match="has no tensor nope"):
        source.read_bf16("nope")


def test_renamed_source(tmp_path: Path) -> None:
    inner = source_of(tmp_path, SOUND)
    source = RenamedSource(inner, {"x": "a.f32"})
    assert source.shapes() == {"x": (5, 7)}
    np.testing.assert_array_equal(source.read("x"), inner.read("a.f32"))
    np.testing.assert_array_equal(source.read_bf16("x"), inner.read_bf16("a.f32"))
    assert source.digest() == inner.digest()
    with pytest.raises(WeightsError, match=r"no tensor a\.f32"):
        source.read("a.f32")


def test_check_params_names_what_is_wrong(tmp_path: Path) -> None:
    source = source_of(tmp_path, SOUND)
    check_params(source, [Param("a.f32", (5, 7))])
    with pytest.raises(WeightsError, match=r"g is missing; a\.f32 has shape \(5, 7\), not \(7, 5\)"):
        check_params(source, [Param("g", (1,)), Param("a.f32", (7, 5))])
