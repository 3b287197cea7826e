"""Rotary tables, shared by every device so that all rotate by the same float32 numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loadproof.graph import RopeScaling, RopeSpec

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_CHUNK = 1024  # positions whose float64 angles exist at a time


def rope_tables(spec: RopeSpec, num_positions: int) -> tuple[F32, F32]:
    """Cosines and sines of every position's angles, each ``[num_positions, head_dim // 2]`` float32.

    The angles are float64 and only their cosines and sines are rounded, so that far positions turn as
    exactly as near ones (Su et al. 2021, arXiv 2104.09864, section 3.2.2).
    """
    frequencies = rope_frequencies(spec)
    cos = np.empty((num_positions, len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, num_positions, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        angles = np.outer(np.arange(start, min(chunk.stop, num_positions), dtype=np.float64), frequencies)
        cos[chunk], sin[chunk] = np.cos(angles), np.sin(angles)
    return cos, sin


def rope_frequencies(spec: RopeSpec) -> F64:
    """Radians a position for each pair of a head, ``[head_dim // 2]`` float64, scaling applied."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies: F64 = spec.theta**-exponents
    if spec.scaling is None:
        return frequencies
    if spec.scaling.kind == "linear":
        return frequencies / spec.scaling.factor
    return _llama3(frequencies, spec.scaling)


def _llama3(frequencies: F64, scaling: RopeScaling) -> F64:
    """Slow pairs stretched by ``factor``, fast ones kept, a linear blend between (Llama 3.1 model card)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: F64 = frequencies * (kept + (1 - kept) / scaling.factor)
    return blended
