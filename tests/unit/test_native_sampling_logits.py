"""What the native sampler makes of logits before it draws, and says of them: penalties, bias, odd values."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from tests.reference_sampler import Settings
from tests.unit.test_native_sampling import (
    INF,
    LEVELS,
    NAN,
    each_level,
    row,
    sample,
    token,
    tokens,
)

# Penalties and bias ---------------------------------------------------------------------------------------

GREEDY = Settings(temperature=0.0)


@each_level
def test_repetition_penalty_covers_prompt_and_output_and_works_once(isa: str) -> None:
    s = replace(GREEDY, history=[0, 1, 1, 1], num_prompt=1, repetition_penalty=2.0)
    assert token(isa, [4.0, 3.9, 1.9], s) == 0  # 2, 1.95, 1.9
    assert token(isa, [4.0, 3.9, 2.1], s) == 2
    assert token(isa, [-1.0, -1.5, -2.1], s) == 0  # -2, -3, -2.1: negative logits are multiplied
    assert token(isa, [-0.5, -0.6, -0.9], s) == 2  # -1, -1.2, -0.9


@each_level
def test_presence_and_frequency_penalties_cover_the_output_alone(isa: str) -> None:
    presence = replace(GREEDY, history=[0, 0, 1, 1], num_prompt=2, presence_penalty=1.0)
    assert token(isa, [5.0, 5.9, 4.8], presence) == 0  # 5, 4.9, 4.8
    frequency = replace(GREEDY, history=[0, 0, 1, 1], num_prompt=2, frequency_penalty=1.0)
    assert token(isa, [3.8, 5.9, 3.85], frequency) == 1  # 3.8, 3.9, 3.85
    assert token(isa, [3.8, 5.8, 3.85], frequency) == 2
    assert token(isa, [1.0, 0.0, 0.0], replace(presence, presence_penalty=-2.0)) == 1


@each_level
def test_penalties_come_before_bias(isa: str) -> None:
    s = replace(GREEDY, history=[0], repetition_penalty=4.0, bias_ids=[0], bias_values=[2.0])
    assert token(isa, [4.0, 2.5], s) == 0  # 4 / 4 + 2, not (4 + 2) / 4


@each_level
def test_bias_adds_up_and_minus_infinity_bans(isa: str) -> None:
    assert token(isa, [0.0, 1.0], replace(GREEDY, bias_ids=[0, 0], bias_values=[0.6, 0.6])) == 0
    assert token(isa, [9.0, 1.0], replace(GREEDY, bias_ids=[0], bias_values=[-INF])) == 1
    banned = Settings(bias_ids=[0, 1], bias_values=[-INF, -INF])
    assert set(tokens(isa, np.array([9, 9, 1, 1], np.float32), banned, 40)) == {2, 3}
    assert set(tokens(isa, np.array([9, 9, 1, 1], np.float32), replace(banned, top_k=3), 40)) == {2, 3}


@each_level
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nothing_left_have_a_defined_answer(isa: str, temperature: float) -> None:
    s = Settings(temperature=temperature, top_k=2, top_p=0.5, num_logprobs=2)
    for value in (NAN, -INF):
        logits = np.full(40, value, np.float32)
        got = sample(isa, logits, s)
        assert got[:3] == (0, -INF, 1)
        assert got.top_ids.tolist() == [0, 1]
        assert got.top_logprobs.tolist() == [-INF, -INF]
        some = replace(s, bias_ids=[0, 1, 3], bias_values=[-INF] * 3)
        assert sample(isa, logits, some).token == 2
    everything = replace(s, bias_ids=list(range(40)), bias_values=[-INF] * 40)
    assert sample(isa, np.zeros(40, np.float32), everything).token == 0


@each_level
def test_nan_is_never_taken_and_infinity_always(isa: str) -> None:
    logits = np.array([NAN, 0.0, INF, NAN, INF, -INF], np.float32)
    assert sample(isa, logits, GREEDY).token == 2
    assert set(tokens(isa, logits, Settings(), 30)) == {2, 4}
    got = sample(isa, logits, replace(GREEDY, num_logprobs=2))
    assert got.top_ids.tolist() == [2, 4]
    assert got.logprob == pytest.approx(-math.log(2), abs=1e-6)


# Log-probabilities ----------------------------------------------------------------------------------------


@each_level
def test_logprobs_are_of_the_raw_logits(isa: str) -> None:
    logits = row("plain", 1000, 6)
    best = int(logits.argmax())
    raw = sample(isa, logits, replace(GREEDY, num_logprobs=5))
    banned = sample(isa, logits, replace(GREEDY, bias_ids=[best], bias_values=[-INF], num_logprobs=5))
    assert raw.token == best == raw.top_ids[0] == banned.top_ids[0]
    assert banned.top_logprobs.tobytes() == raw.top_logprobs.tobytes()
    assert (banned.token, banned.rank) == (raw.top_ids[1], 2)
    assert banned.logprob == raw.top_logprobs[1]


@each_level
def test_all_logprobs_sum_to_one(isa: str) -> None:
    logits = row("plain", 5000, 7)
    got = sample(isa, logits, Settings(num_logprobs=5000))
    assert sorted(got.top_ids.tolist()) == list(range(5000))
    assert np.exp(got.top_logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-6)


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": INF}, "penalties"),
        ({"frequency_penalty": NAN}, "penalties"),
        ({"position": -1}, "position"),
        ({"num_logprobs": 11}, "num_logprobs"),
        ({"num_logprobs": -2}, "num_logprobs"),
        ({"history": [10]}, "history: token 10"),
        ({"history": [-1]}, "history: token -1"),
        ({"num_prompt": 1}, "num_prompt"),
        ({"bias_ids": [10], "bias_values": [0.0]}, "bias_ids: token 10"),
        ({"bias_ids": [1]}, "one length"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    arguments = asdict(Settings()) | change
    with pytest.raises(ValueError, match=message):
        sample(LEVELS[0], np.zeros(10, np.float32), Settings(**arguments))


def test_unknown_levels_and_empty_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no instruction-set level 'none'"):
        sample("none", np.zeros(10, np.float32), Settings())
    with pytest.raises(ValueError, match="from 1 to"):
        sample(LEVELS[0], np.zeros(0, np.float32), Settings())
