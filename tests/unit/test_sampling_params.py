from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loadproof import SamplingParams
from loadproof.engine.sampling_params import MAX_N, MAX_STOPS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", bad) for bad in (-0.1, math.nan, math.inf, "1", None, True, 10**400)],
        *[("top_p", bad) for bad in (0, -0.5, 1.01, math.nan, None)],
        *[("top_k", bad) for bad in (-2, 1.5, True, "3")],
        *[("min_p", bad) for bad in (-0.01, 1.01, math.nan)],
        *[("presence_penalty", bad) for bad in (-2.01, 2.01, math.nan)],
        *[("frequency_penalty", bad) for bad in (-2.01, 2.01, math.inf)],
        *[("repetition_penalty", bad) for bad in (0, -1, math.inf, math.nan)],
        *[("max_tokens", bad) for bad in (0, -1, 1.0, 2**31)],
        *[("min_tokens", bad) for bad in (-1, None, 17)],
        *[("n", bad) for bad in (0, -1, MAX_N + 1, 1.0, True)],
        *[("seed", bad) for bad in (-(2**63) - 1, 2**64, 0.5, "1")],
        *[(name, bad) for name in ("logprobs", "prompt_logprobs") for bad in (-2, 1.5, True, "1")],
        *[("stop", bad) for bad in ("", [""], ["a", 1], 7, ["a"] * (MAX_STOPS + 1), ["a" * 5000], b"x")],
        *[("stop_token_ids", bad) for bad in ([-1], ["a"], 3, [True], list(range(5000)), "12")],
        *[("logit_bias", bad) for bad in ({-1: 0.0}, {1: 101}, {1: math.nan}, {"a": 1}, [1])],
        *[(name, 1) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")],
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (16, 0, 1, None)
    assert not params.uses_penalties


def test_values_are_brought_to_one_form() -> None:
    ids: list[Any] = [np.int64(3), np.int32(5)]
    params = SamplingParams(
        stop="END", top_k=-1, temperature=0, stop_token_ids=ids[:1], logit_bias={ids[1]: 1}
    )
    assert params.stop == ("END",)
    assert params.top_k == 0
    assert params.temperature == 0.0
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {5: 1.0}
    assert type(params.stop_token_ids[0]) is int


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}]
)
def test_each_penalty_needs_the_history(penalty: dict[str, float]) -> None:
    assert SamplingParams(**penalty).uses_penalties  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=1, min_p=1, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(seed=-(2**63), max_tokens=1, min_tokens=1, n=MAX_N, logprobs=0, prompt_logprobs=0)
    SamplingParams(logprobs=-1, prompt_logprobs=-1)
    SamplingParams(seed=2**64 - 1, max_tokens=None, min_tokens=10**6, logit_bias={0: -100, 1: 100})
