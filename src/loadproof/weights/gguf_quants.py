"""GGUF tensor types and their exact widening to float32, or rounding to bfloat16.

A tensor is a row of fixed-size blocks, each with its own scales (layouts: ggml's ``ggml-common.h``). Results
equal ``gguf.quants.dequantize`` bit for bit: the same float32 operations in the same order. The common types
are decoded here, several times faster; the rare ones by that package, which is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loadproof.weights.chunks import CHUNK, pieces, run_shares
from loadproof.weights.tensors import BF16, F32, Array, WeightsError

U8 = npt.NDArray[np.uint8]
Decoder = Callable[[U8, F32], None]


@dataclass(frozen=True)
class TensorType:
    """One of ggml's tensor types: ``block_size`` elements are stored in ``block_bytes`` bytes."""

    code: int  # ggml's number for it
    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES = {
    kind.code: kind
    for kind in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(10, "Q2_K", 256, 84),
        TensorType(11, "Q3_K", 256, 110),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
        TensorType(16, "IQ2_XXS", 256, 66),
        TensorType(17, "IQ2_XS", 256, 74),
        TensorType(18, "IQ3_XXS", 256, 98),
        TensorType(19, "IQ1_S", 256, 50),
        TensorType(20, "IQ4_NL", 32, 18),
        TensorType(21, "IQ3_S", 256, 110),
        TensorType(22, "IQ2_S", 256, 82),
        TensorType(23, "IQ4_XS", 256, 136),
        TensorType(29, "IQ1_M", 256, 56),
        TensorType(30, "BF16", 1, 2),
        TensorType(34, "TQ1_0", 256, 54),
        TensorType(35, "TQ2_0", 256, 66),
        TensorType(39, "MXFP4", 32, 17),
        TensorType(40, "NVFP4", 64, 36),
    )
}


def dequantize(raw: U8, kind: TensorType, shape: tuple[int, ...]) -> Array:
    """Widen the contiguous blocks ``raw`` to ``shape``: bfloat16 for BF16, else float32.

    F32 and BF16 come back as views of ``raw``. ``raw`` holds exactly the blocks of ``shape``.
    """
    if kind.name == "F32":
        return np.asarray(raw.view(np.float32).reshape(shape))
    if kind.name == "BF16":
        return np.asarray(raw.view(ml_dtypes.bfloat16).reshape(shape))
    out = np.empty(shape, np.float32)
    _decode(raw, kind, out)
    return out


def dequantize_bf16(raw: U8, kind: TensorType, shape: tuple[int, ...]) -> BF16:
    """``dequantize`` rounded to the nearest bfloat16, ties to even, through a float32 chunk in cache."""
    if kind.name == "BF16":
        return np.asarray(raw.view(ml_dtypes.bfloat16).reshape(shape))
    out = np.empty(shape, ml_dtypes.bfloat16)
    _decode(raw, kind, out)
    return out


def _decode(raw: U8, kind: TensorType, out: Array) -> None:
    blocks, rows = raw.reshape(-1, kind.block_bytes), out.reshape(-1, kind.block_size)
    decode = _DECODERS.get(kind.name) or _rare_decoder(kind)
    per_chunk = CHUNK // kind.block_size

    def share(start: int, stop: int) -> None:
        scratch = np.empty((min(per_chunk, stop - start), kind.block_size), np.float32)
        with np.errstate(all="ignore"):  # scales that are not finite are the file's own affair
            for piece in pieces(start, stop, per_chunk):
                values = scratch[: piece.stop - piece.start]
                decode(blocks[piece], values)
                rows[piece] = values

    run_shares(len(blocks), per_chunk, share)


def _rare_decoder(kind: TensorType) -> Decoder:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as reference

    if kind.name not in GGMLQuantizationType.__members__:
        raise WeightsError(f"the installed gguf package is too old for {kind.name} tensors")
    number = GGMLQuantizationType[kind.name]

    def decode(blocks: U8, out: F32) -> None:
        out[:] = reference(blocks, number)

    return decode


def _f32(blocks: U8, out: F32) -> None:
    out[:] = blocks.view(np.float32)


def _f16(blocks: U8, out: F32) -> None:
    out[:] = blocks.view(np.float16)


def _half(blocks: U8, at: int) -> F32:
    """The float16 scale at byte ``at`` of each block, ``[n, 1]``."""
    return blocks.view(np.float16)[:, at // 2, None].astype(np.float32)


def _nibbles(packed: U8, width: int) -> U8:
    """Every run of ``width`` bytes to its low halves, then its high halves: ``[runs, 2 * width]``.

    NumPy moves a run as one item, which is twice as fast as moving its bytes.
    """
    run = np.dtype((np.void, width))
    flat = np.ascontiguousarray(packed.view(run)).view(np.uint8).reshape(-1)
    out = np.empty((flat.size // width, 2), run)
    out[:, 0] = (flat & 15).view(run)
    out[:, 1] = (flat >> 4).view(run)
    return out.view(np.uint8)


def _q4(blocks: U8, at: int) -> U8:
    """32 numbers of 4 bits a block, from the 16 bytes at ``at``: ``[n, 32]``."""
    return _nibbles(blocks[:, at : at + 16], 16)


def _q5(blocks: U8, at: int) -> U8:
    """32 numbers of 5 bits a block: 4 bytes of top bits at ``at``, then 16 bytes of low nibbles."""
    numbers = _q4(blocks, at + 4)
    high = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), bitorder="little").reshape(-1, 32)
    high <<= 4
    numbers |= high
    return numbers


def _scaled(out: F32, numbers: npt.NDArray[np.int8] | U8, scale: F32) -> None:
    """``out = numbers * scale``, in float32."""
    out[:] = numbers
    np.multiply(out, scale, out=out)


def _shifted(out: F32, numbers: U8, scale: F32, minimum: F32) -> None:
    """``out = numbers * scale + minimum``, in float32."""
    _scaled(out, numbers, scale)
    np.add(out, minimum, out=out)


def _q4_0(blocks: U8, out: F32) -> None:
    numbers = _q4(blocks, 2).view(np.int8)
    numbers -= 8
    _scaled(out, numbers, _half(blocks, 0))


def _q4_1(blocks: U8, out: F32) -> None:
    _shifted(out, _q4(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: U8, out: F32) -> None:
    numbers = _q5(blocks, 2).view(np.int8)
    numbers -= 16
    _scaled(out, numbers, _half(blocks, 0))


def _q5_1(blocks: U8, out: F32) -> None:
    _shifted(out, _q5(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: U8, out: F32) -> None:
    _scaled(out, blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _k_scales(blocks: U8) -> tuple[F32, F32]:
    """Scale and negated minimum of each 32 elements of a Q4_K or Q5_K block: two ``[n, 8, 1]``.

    Bytes 4..16 pack eight scales and eight minima of 6 bits, in units of the block's two float16 scales.
    """
    low, mid, top = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (top & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (top >> 4) | ((mid >> 2) & 48)], axis=1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    return scale[:, :, None], np.negative(minimum)[:, :, None]


def _q4_k(blocks: U8, out: F32) -> None:
    numbers = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    _shifted(out.reshape(-1, 8, 32), numbers, *_k_scales(blocks))


def _q5_k(blocks: U8, out: F32) -> None:
    numbers = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    high = np.ascontiguousarray(blocks[:, 16:48])
    for group in range(8):
        numbers[:, group] |= ((high >> group) & 1) << 4
    _shifted(out.reshape(-1, 8, 32), numbers, *_k_scales(blocks))


def _q6_k(blocks: U8, out: F32) -> None:
    numbers = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for quarter in range(4):
        numbers[:, :, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    signed = numbers.view(np.int8)
    signed -= 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    _scaled(out.reshape(-1, 16, 16), signed.reshape(-1, 16, 16), scale[:, :, None])


_DECODERS: dict[str, Decoder] = {
    "F32": _f32,
    "F16": _f16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
