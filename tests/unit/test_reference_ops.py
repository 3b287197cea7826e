"""Each op of the oracle against its formula, computed another way."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from loadproof.devices import reference
from loadproof.devices.rope import rope_frequencies, rope_tables
from loadproof.graph import Attention, RopeScaling, RopeSpec, Value

F32 = npt.NDArray[np.float32]


def draw(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_linear_adds_its_bias() -> None:
    x, weight, bias = draw(5, 7), draw(3, 7, seed=1), draw(3, seed=2)
    expected = [[math.fsum(map(float, row * w)) + b for w, b in zip(weight, bias, strict=True)] for row in x]
    np.testing.assert_allclose(reference.linear(x, weight, bias), expected, atol=1e-5)
    np.testing.assert_allclose(reference.linear(x, weight), np.asarray(expected) - bias, atol=1e-5)


def test_rms_norm_of_a_row_and_of_its_groups() -> None:
    x, weight = draw(4, 12), draw(12, seed=1)
    expected = np.array(
        [[v / math.sqrt(sum(u * u for u in row) / 12 + 1e-3) * w for v, w in zip(row, weight, strict=True)]
         for row in x.tolist()]
    )  # fmt: skip
    np.testing.assert_allclose(reference.rms_norm(x, weight, 1e-3), expected, rtol=1e-5)
    grouped = reference.rms_norm(x, weight[:4], 1e-3)
    for start in (0, 4, 8):
        one = reference.rms_norm(np.ascontiguousarray(x[:, start : start + 4]), weight[:4], 1e-3)
        np.testing.assert_array_equal(grouped[:, start : start + 4], one)


def test_rope_turns_each_pair_as_a_complex_number() -> None:
    spec = RopeSpec(head_dim=8, theta=100.0)
    x = draw(6, 3 * 8)
    heads = x.reshape(6, 3, 8).astype(np.float64)
    pairs = heads[..., :4] + 1j * heads[..., 4:]
    angles = np.arange(6)[:, None] * 100.0 ** (-2 * np.arange(4) / 8)
    turned = pairs * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1).reshape(6, 24)
    np.testing.assert_allclose(reference.rope(x, *rope_tables(spec, 6)), expected, atol=1e-6)


@pytest.mark.parametrize("num_positions", [0, 1, 1023, 1024, 1025, 5000])
def test_rope_tables_are_those_of_all_angles_at_once(num_positions: int) -> None:
    spec = RopeSpec(head_dim=12, theta=10000.0)
    angles = np.outer(np.arange(num_positions, dtype=np.float64), rope_frequencies(spec))
    cos, sin = rope_tables(spec, num_positions)
    np.testing.assert_array_equal(cos, np.cos(angles).astype(np.float32))
    np.testing.assert_array_equal(sin, np.sin(angles).astype(np.float32))


def test_rope_tables_stay_exact_far_out() -> None:
    cos, sin = rope_tables(RopeSpec(head_dim=4, theta=10000.0), 100_001)
    assert cos.shape == sin.shape == (100_001, 2)
    assert cos.dtype == sin.dtype == np.float32
    assert cos[100_000, 0] == np.float32(math.cos(100_000))
    assert sin[100_000, 1] == np.float32(math.sin(1000.0))


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = RopeSpec(8, 1e4), RopeSpec(8, 1e4, RopeScaling("linear", 4.0))
    for ours, theirs in zip(rope_tables(scaled, 41), rope_tables(plain, 11), strict=True):
        np.testing.assert_allclose(ours[::4], theirs, atol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_stretches_slow_ones_and_blends_between() -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain = rope_frequencies(RopeSpec(128, 5e5))
    ratio = rope_frequencies(RopeSpec(128, 5e5, scaling)) / plain
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1.0)
    np.testing.assert_allclose(ratio[wavelengths > 8192 / 1], 1 / 8)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    smooth = (8192 / wavelengths[between] - 1) / 3
    np.testing.assert_allclose(ratio[between], (1 - smooth) / 8 + smooth)
    assert between.any()


def attend_naively(q: F32, k: F32, v: F32, op: Attention) -> npt.NDArray[np.float64]:
    """One query, head and key at a time, in Python floats."""
    size, group = op.head_dim, op.num_heads // op.num_kv_heads
    out = np.zeros(q.shape)
    for t in range(len(q)):
        first = 0 if op.window is None else max(0, t - op.window + 1)
        for h in range(op.num_heads):
            ours, theirs = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
            scores = [float(q[t, ours] @ k[s, theirs]) * op.scale for s in range(first, t + 1)]
            if op.softcap is not None:
                scores = [op.softcap * math.tanh(score / op.softcap) for score in scores]
            total = sum(map(math.exp, scores))
            for s, score in enumerate(scores, first):
                out[t, ours] += math.exp(score) / total * v[s, theirs]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("chunk", [4, 128])
def test_attention_against_one_key_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    softcap: float | None,
    heads: int,
    kv_heads: int,
    chunk: int,
) -> None:
    monkeypatch.setattr(reference, "_CHUNK", chunk)
    q, k, v = draw(11, heads * 6), draw(11, kv_heads * 6, seed=1), draw(11, kv_heads * 6, seed=2)
    nothing = Value(0, 0)
    op = Attention(nothing, nothing, nothing, 0, heads, kv_heads, 6, 0.7, window, softcap)
    np.testing.assert_allclose(reference.attention(q, k, v, op), attend_naively(q, k, v, op), atol=1e-6)


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (reference.silu, lambda x: x / (1 + math.exp(-x))),
        (reference.gelu, lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        (
            reference.gelu_tanh,
            lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        ),
    ],
)
def test_activations(function: Callable[[F32], F32], formula: Callable[[float], float]) -> None:
    x = np.linspace(-20, 20, 401, dtype=np.float32)
    np.testing.assert_allclose(function(x), [formula(v) for v in x.tolist()], atol=2e-6)
    assert function(np.array([-1000.0, 1000.0], np.float32)).tolist() == [0.0, 1000.0]


def test_soft_cap() -> None:
    x = draw(50) * 10
    assert reference.soft_cap(x, None) is x
    np.testing.assert_allclose(
        reference.soft_cap(x, 3.0), [3 * math.tanh(v / 3) for v in x.tolist()], rtol=1e-5
    )


def test_softmax_does_not_overflow() -> None:
    np.testing.assert_allclose(
        reference.softmax(np.array([[1e4, 1e4, -np.inf]], np.float32)), [[0.5, 0.5, 0.0]]
    )
