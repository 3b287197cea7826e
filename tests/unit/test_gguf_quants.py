from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from loadproof.weights.chunks import CHUNK
from loadproof.weights.gguf_quants import TENSOR_TYPES, TensorType, dequantize, dequantize_bf16

COMMON = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Common types: more than two shares of two chunks and an odd rest. Rare ones: enough for one odd chunk.
COUNTS = dict.fromkeys(COMMON, 4 * CHUNK + 768)

every_type = pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)


def random_blocks(kind: TensorType, seed: int) -> npt.NDArray[np.uint8]:
    """Every bit pattern is a valid block; scales that are infinite or no number are among them."""
    num_blocks = COUNTS.get(kind.name, 5 * 768) // kind.block_size
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, kind.block_bytes), np.uint8)


def reference(kind: TensorType, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.code))).reshape(-1)


def assert_same(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Equal bits; any NaN equals any other."""
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~numbers)
    np.testing.assert_array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@every_type
def test_float32_equals_the_gguf_package(kind: TensorType) -> None:
    blocks = random_blocks(kind, 1)
    expected = reference(kind, blocks)
    found = dequantize(blocks.reshape(-1), kind, (expected.size,))
    assert found.dtype == (ml_dtypes.bfloat16 if kind.name == "BF16" else np.float32)
    with np.errstate(invalid="ignore"):
        assert_same(np.asarray(found.astype(np.float32)), expected)


@every_type
def test_bfloat16_is_the_float32_rounded_to_nearest_even(kind: TensorType) -> None:
    blocks = random_blocks(kind, 2)
    expected = reference(kind, blocks)
    found = dequantize_bf16(blocks.reshape(-1), kind, (expected.size,))
    assert found.dtype == ml_dtypes.bfloat16
    with np.errstate(invalid="ignore"):
        assert_same(found.astype(np.float32), expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_every_type_that_the_gguf_package_decodes_is_known() -> None:
    decodable = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert {kind.name for kind in TENSOR_TYPES.values()} == decodable
    for kind in TENSOR_TYPES.values():
        number = gguf.GGMLQuantizationType[kind.name]
        assert (kind.code, kind.block_size, kind.block_bytes) == (number, *gguf.GGML_QUANT_SIZES[number])


def test_shape_is_kept_and_float32_is_a_view() -> None:
    raw = np.arange(24, dtype=np.float32).view(np.uint8)
    found = dequantize(raw, TENSOR_TYPES[0], (2, 3, 4))
    assert found.shape == (2, 3, 4)
    assert np.shares_memory(found, raw)


def test_ties_round_to_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)  # halfway between neighbours
    found = dequantize_bf16(values.view(np.uint8), TENSOR_TYPES[0], (3,))
    assert found.astype(np.float32).tolist() == [1.0, 1 + 2**-6, -1.0]
