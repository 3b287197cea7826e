"""The float32 oracle with what enters a product rounded to bf16, as engines that compute in bf16 do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import ml_dtypes
import numpy as np

from loadproof.devices import reference
from loadproof.devices.reference import F32
from loadproof.graph import Attention


def rounded(x: F32) -> F32:
    """The nearest bf16 values, in float32."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@contextmanager
def rounding() -> Iterator[None]:
    """Meanwhile :class:`~loadproof.devices.reference.ReferenceDevice` rounds inputs and weights of linear
    layers, and queries, keys and values; all else stays in float32.
    """
    linear, attention = reference.linear, reference.attention

    def rounding_linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
        return linear(rounded(x), rounded(weight), bias)

    def rounding_attention(q: F32, k: F32, v: F32, op: Attention) -> F32:
        return attention(rounded(q), rounded(k), rounded(v), op)

    with (
        patch.object(reference, "linear", rounding_linear),
        patch.object(reference, "attention", rounding_attention),
    ):
        yield
