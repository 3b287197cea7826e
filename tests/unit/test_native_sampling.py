"""The native sampler against the reference of tests/reference_sampler.py, at every level of this machine."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import reference_sampler as reference
from tests.reference_sampler import F32, Settings

from loadproof import _native

LEVELS = _native.available_levels()
SIZES = [1, 2, 15, 16, 17, 31, 100, 255, 256, 257, 1000, 5000]
NAN, INF = math.nan, math.inf

each_level = pytest.mark.parametrize("isa", LEVELS)


class Sampled(NamedTuple):
    token: int
    logprob: float
    rank: int
    top_ids: npt.NDArray[np.int32]
    top_logprobs: F32


def arguments_of(s: Settings) -> dict[str, Any]:
    arrays = {
        "history": np.array(s.history, np.int32),
        "bias_ids": np.array(s.bias_ids, np.int32),
        "bias_values": np.array(s.bias_values, np.float32),
    }
    return asdict(s) | arrays


def sample(isa: str, logits: F32, s: Settings) -> Sampled:
    return Sampled(*_native.sample_row(logits, isa=isa, **arguments_of(s)))


def token(isa: str, logits: list[float], s: Settings) -> int:
    return sample(isa, np.array(logits, np.float32), s).token


def tokens(isa: str, logits: F32, s: Settings, count: int) -> list[int]:
    arguments = arguments_of(s)
    return [_native.sample_row(logits, isa=isa, **arguments | {"position": i})[0] for i in range(count)]


def check(logits: F32, s: Settings) -> None:
    """Every level agrees with the reference in everything that it reports of a row."""
    given_bytes = logits.tobytes()
    possible = reference.possible_tokens(logits, s)
    expected = reference.logprobs(logits)
    order = reference.in_order(reference.readable(logits))[: max(s.num_logprobs, 0)]
    for isa in LEVELS:
        got = sample(isa, logits, s)
        assert got.token in possible, isa
        assert logits.tobytes() == given_bytes
        if s.num_logprobs >= 0:
            assert got.logprob == pytest.approx(expected[got.token], rel=2e-6, abs=2e-6)
            assert got.rank == reference.rank(logits, got.token)
            assert got.top_ids.tolist() == order.tolist()
            np.testing.assert_allclose(got.top_logprobs, expected[order], rtol=2e-6, atol=2e-6)


def row(kind: str, size: int, seed: int) -> F32:
    """Logits of one kind: without ties, with many, mostly unusable, or all in a narrow range."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(size) * 4).astype(np.float32)
    if kind == "levels":
        x = np.round(x)
    elif kind == "broken":
        x[rng.random(size) < 0.4] = -np.inf
        x[rng.random(size) < 0.3] = np.nan
        x[rng.random(size) < 0.02] = np.inf
    elif kind == "narrow":
        x = (20 + rng.random(size) * 1e-3).astype(np.float32)
    return x


@st.composite
def row_settings(draw: st.DrawFn, size: int) -> Settings:
    ids = st.integers(0, size - 1)
    history = draw(st.lists(ids, max_size=20))
    bias = draw(st.lists(st.tuples(ids, st.sampled_from([-INF, -100.0, -1.5, 0.25, 3.0, 100.0])), max_size=8))
    return Settings(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.01, 0.3, 0.7, 1.0, 1.5, 10.0, 1e6])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 20, 50, 300, size, size + 1, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.1, 3.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -1.0, 0.3, 2.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        position=draw(st.integers(0, 2**40)),
        history=history,
        num_prompt=draw(st.integers(0, len(history))),
        bias_ids=[token_id for token_id, _ in bias],
        bias_values=[value for _, value in bias],
        num_logprobs=draw(st.sampled_from([-1, 0, 1, 5, 20, 400, size])),
    )


def within(s: Settings, size: int) -> Settings:
    return replace(s, num_logprobs=min(s.num_logprobs, size))


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(), kind=st.sampled_from(["plain", "levels", "broken", "narrow"]), seed=st.integers(0, 999)
)
def test_every_combination_agrees_with_the_reference(data: st.DataObject, kind: str, seed: int) -> None:
    size = data.draw(st.sampled_from(SIZES))
    logits = row(kind, size, seed)
    s = within(data.draw(row_settings(size)), size)
    check(logits, s)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_floats_at_all_agree_with_the_reference(data: st.DataObject, values: list[float]) -> None:
    logits = np.array(values, np.float32)
    s = within(data.draw(row_settings(logits.size)), logits.size)
    check(logits, s)


# Random numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers that Random123 publishes for philox4x32-10
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_reference_philox_gives_the_published_answers(
    counter: reference.Words, key: tuple[int, int], words: reference.Words
) -> None:
    assert reference.philox4x32(counter, key) == words


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**63 - 1))
def test_native_philox_is_the_reference(seed: int, position: int) -> None:
    counter = (position % 2**32, position >> 32, 0, 0)
    assert _native.philox(seed, position) == reference.philox4x32(counter, (seed % 2**32, seed >> 32))


def chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    """The statistic in standard deviations above its mean (Wilson and Hilferty's cube root)."""
    used = expected > 0
    assert not counts[~used].any()
    degrees = int(used.sum()) - 1
    statistic = float((((counts - expected)[used]) ** 2 / expected[used]).sum())
    spread = 2 / (9 * degrees)
    cube_root: float = (statistic / degrees) ** (1 / 3)
    return (cube_root - (1 - spread)) / math.sqrt(spread)


@each_level
@pytest.mark.parametrize(
    "s",
    [
        Settings(seed=11),
        Settings(seed=12, temperature=0.5),
        Settings(seed=13, top_k=7),
        Settings(seed=14, top_p=0.8),
        Settings(seed=15, min_p=0.1),
        Settings(seed=16, top_k=12, top_p=0.9, min_p=0.01, temperature=1.7),
        Settings(seed=17, history=[3, 4, 4], num_prompt=1, frequency_penalty=0.5, repetition_penalty=1.2),
    ],
    ids=lambda s: f"seed{s.seed}",
)
def test_draws_follow_the_probabilities(isa: str, s: Settings) -> None:
    logits = np.random.default_rng(5).standard_normal(24).astype(np.float32)
    x = reference.readable(reference.adjusted(logits, s))
    kept = reference.survivors(x, s, s.top_p, s.min_p)
    probabilities = np.zeros(24)
    probabilities[kept] = reference.weights(x, s.temperature)[kept]
    probabilities /= probabilities.sum()
    draws = 3000
    counts = np.bincount(tokens(isa, logits, s, draws), minlength=24)
    assert abs(chi_square(counts, probabilities * draws)) < 4.5


def test_seeds_and_positions_draw_apart() -> None:
    logits = np.zeros(5000, np.float32)
    by_position = tokens(LEVELS[0], logits, Settings(seed=1), 200)
    by_seed = [sample(LEVELS[0], logits, Settings(seed=seed)).token for seed in range(200)]
    assert len(set(by_position)) > 180
    assert len(set(by_seed)) > 180
    assert by_position != tokens(LEVELS[0], logits, Settings(seed=2), 200)


# What a row's answer may depend on ------------------------------------------------------------------------


@each_level
def test_the_same_row_gives_the_same_bits_whatever_came_before(isa: str) -> None:
    s = Settings(top_p=0.9, seed=3, num_logprobs=10)
    logits = row("plain", 3000, 1)
    first = sample(isa, logits, s)
    for other in range(5):
        sample(isa, row("broken", 4000, other), Settings(top_k=30, history=[1, 2], presence_penalty=1.0))
        again = sample(isa, logits, s)
        assert again[:3] == first[:3]
        assert again.top_ids.tobytes() == first.top_ids.tobytes()
        assert again.top_logprobs.tobytes() == first.top_logprobs.tobytes()


@each_level
@pytest.mark.parametrize("size", SIZES)
def test_memory_around_the_row_is_not_read(isa: str, size: int) -> None:
    logits = row("plain", size, size)
    s = Settings(top_p=0.9, seed=size, num_logprobs=min(size, 20))
    alone = sample(isa, logits, s)
    for surround in (INF, NAN, 1e30):
        for shift in (1, 7):
            memory = np.full(size + 64, surround, np.float32)
            memory[shift : shift + size] = logits
            inside = sample(isa, memory[shift : shift + size], s)
            assert inside[:3] == alone[:3]
            assert inside.top_logprobs.tobytes() == alone.top_logprobs.tobytes()


@each_level
def test_equivalent_settings_draw_the_same_token(isa: str) -> None:
    logits = row("plain", 1000, 4)
    for position in range(50):
        s = Settings(seed=9, position=position)
        plain = sample(isa, logits, s).token
        for same in (
            replace(s, top_k=1000),
            replace(s, top_k=2**31 - 1),
            replace(s, repetition_penalty=2.0),
            replace(s, history=[5, 6]),
            replace(s, bias_ids=[3], bias_values=[0.0]),
        ):
            assert sample(isa, logits, same).token == plain


# Greedy and ties ------------------------------------------------------------------------------------------


@each_level
@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_lowest_of_the_best(isa: str, size: int) -> None:
    for best in {0, size // 2, size - 1}:
        logits = np.full(size, -3.0, np.float32)
        logits[best:] = 2.0
        assert sample(isa, logits, Settings(temperature=0.0)).token == best


@each_level
def test_temperatures_too_small_to_divide_by_are_greedy(isa: str) -> None:
    assert token(isa, [1.0, 1.0001, 1.0001], Settings(temperature=9e-6)) == 1
    assert set(tokens(isa, np.array([1, 1 + 1e-6, 1], np.float32), Settings(temperature=1e-5), 60)) == {
        0,
        1,
        2,
    }


@each_level
def test_minus_zero_ties_with_zero(isa: str) -> None:
    assert token(isa, [-1.0, -0.0, 0.0], Settings(temperature=0.0)) == 1
    zeros = np.array([-1.0, -0.0, 0.0], np.float32)
    assert set(tokens(isa, zeros, Settings(top_k=1), 20)) == {1}
    assert sample(isa, zeros, Settings(temperature=0.0, num_logprobs=3)).top_ids.tolist() == [1, 2, 0]


@each_level
@pytest.mark.parametrize("size", [20, 700])
def test_top_k_among_ties_keeps_exactly_the_lowest_ids(isa: str, size: int) -> None:
    assert set(tokens(isa, np.zeros(size, np.float32), Settings(top_k=3), 60)) == {0, 1, 2}


@each_level
def test_top_p_among_ties_keeps_the_fewest_lowest_ids(isa: str) -> None:
    # A quarter each: two tokens reach just half, more needs a third.
    logits = np.zeros(4, np.float32)
    assert set(tokens(isa, logits, Settings(top_p=0.5), 60)) == {0, 1}
    assert set(tokens(isa, logits, Settings(top_p=0.51), 60)) == {0, 1, 2}
    assert set(tokens(isa, logits, Settings(top_p=0.5, top_k=2), 60)) == {0}


# Filters --------------------------------------------------------------------------------------------------


@each_level
def test_filters_that_leave_one_token_leave_the_best(isa: str) -> None:
    logits = row("plain", 1000, 2)
    best = int(logits.argmax())
    for s in (Settings(top_k=1), Settings(top_p=0.0), Settings(top_p=1e-9), Settings(min_p=1.0)):
        assert set(tokens(isa, logits, replace(s, temperature=5.0), 40)) == {best}


@each_level
def test_min_p_is_a_share_of_the_best_probability(isa: str) -> None:
    logits = np.log(np.array([0.5, 0.26, 0.24], np.float32))
    assert set(tokens(isa, logits, Settings(min_p=0.5), 60)) == {0, 1}
    # At a temperature of 2 the shares are square roots: 1, 0.72, 0.69.
    assert set(tokens(isa, logits, Settings(min_p=0.7, temperature=2.0), 60)) == {0, 1}


@each_level
def test_top_p_counts_what_top_k_and_min_p_left(isa: str) -> None:
    logits = np.log(np.array([0.3, 0.25, 0.2, 0.15, 0.1], np.float32))
    assert set(tokens(isa, logits, Settings(top_p=0.54), 80)) == {0, 1}
    assert set(tokens(isa, logits, Settings(top_p=0.56), 80)) == {0, 1, 2}
    # Of the best three's 0.75, the first two have 0.73.
    assert set(tokens(isa, logits, Settings(top_p=0.72, top_k=3), 80)) == {0, 1}
    assert set(tokens(isa, logits, Settings(top_p=0.74, top_k=3), 80)) == {0, 1, 2}
    assert set(tokens(isa, logits, Settings(top_p=0.72, min_p=0.6), 80)) == {0, 1}


@pytest.mark.parametrize("kind", ["plain", "levels", "narrow", "broken"])
def test_large_vocabularies(kind: str) -> None:
    logits = row(kind, 50001, 8)
    for position, (temperature, top_p, top_k) in enumerate(
        [(1.0, 0.9, 0), (4.0, 0.999, 0), (0.2, 0.5, 0), (1.0, 0.9, 50), (1.0, 1.0, 4000), (30.0, 0.3, 0)]
    ):
        s = Settings(temperature=temperature, top_p=top_p, top_k=top_k, position=position, num_logprobs=20)
        check(logits, s)


@each_level
def test_equal_logits_in_a_large_vocabulary(isa: str) -> None:
    logits = np.full(49152, 7.5, np.float32)
    drawn = tokens(isa, logits, Settings(top_p=0.25, seed=4), 40)
    assert max(drawn) < 49152 / 4 + 2
    assert max(drawn) > 49152 / 8
