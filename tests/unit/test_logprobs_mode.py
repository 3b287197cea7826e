"""What log-probabilities are of, in each mode: the native sampler against NumPy, and in a whole engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import reference_sampler as reference
from tests.reference_sampler import F32, F64, Settings
from tests.tiny_models import write_model

from loadproof import LLM, RequestOutput, SamplingParams, _native
from loadproof.config import LOGPROBS_MODES
from loadproof.engine.prompts import TokensPrompt

LEVELS = _native.available_levels()
Mode = _native.LogprobsMode
each_level = pytest.mark.parametrize("isa", LEVELS)


@dataclass(frozen=True)
class Described:
    """A row as one mode tells it: a number for every token id, -inf where it has none."""

    token: int
    value: float  # of the token
    rank: int
    order: npt.NDArray[np.int32]  # token ids, best first
    values: F32  # by token id


def describe(isa: str, logits: F32, s: Settings, mode: Mode) -> Described:
    arguments = asdict(replace(s, num_logprobs=logits.size)) | {
        "history": np.array(s.history, np.int32),
        "bias_ids": np.array(s.bias_ids, np.int32),
        "bias_values": np.array(s.bias_values, np.float32),
    }
    token, value, rank, ids, found = _native.sample_row(logits, isa=isa, **arguments, logprobs_mode=mode)
    values = np.full(logits.size, np.nan, np.float32)
    values[ids] = found
    assert not np.isnan(values).any(), "a token is left out"
    return Described(token, value, rank, ids, values)


def row_of(seed: int, size: int) -> F32:
    return (3 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


@st.composite
def rows(draw: Callable[..., int]) -> tuple[F32, Settings]:
    """Logits, and settings of every kind; some tokens are in the history, some are biased or banned."""
    size = draw(st.sampled_from([2, 15, 16, 17, 100, 256, 257, 1000]))
    some_ids = st.lists(st.integers(0, size - 1), max_size=12)
    history = draw(some_ids)
    bias_ids: list[int] = draw(st.lists(st.integers(0, size - 1), max_size=size // 2, unique=True))  # type: ignore[assignment]
    biases = st.sampled_from([-np.inf, -2.5, 0.0, 4.0])
    return row_of(draw(st.integers(0, 999)), size), Settings(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 50])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.4])),
        seed=draw(st.integers(0, 99)),
        position=draw(st.integers(0, 99)),
        history=history,  # type: ignore[arg-type]
        num_prompt=draw(st.integers(0, len(history))),  # type: ignore[arg-type]
        bias_ids=bias_ids,
        bias_values=[draw(biases) for _ in bias_ids],
    )


def log_softmax(x: F64) -> F64:
    best = x.max()
    return np.asarray(x - best - np.log(np.exp(x - best).sum()), np.float64)


def processed(logits: F32, s: Settings, kept: int) -> F64:
    """Logits that are sampled from, where the ``kept`` best survive the filters."""
    x = reference.readable(reference.adjusted(logits, s))
    if s.temperature < 1e-5:
        return x
    scaled = np.full(x.size, -np.inf)
    best = reference.in_order(x)[:kept]
    scaled[best] = x[best] / float(np.float32(s.temperature))
    return scaled


def kept_counts(logits: F32, s: Settings) -> tuple[int, int]:
    """Least and most survivors that rounding of the weights allows."""
    x = reference.readable(reference.adjusted(logits, s))
    sizes = [
        reference.survivors(x, s, top_p, min_p).size
        for top_p in reference._around(s.top_p, off=1.0)
        for min_p in reference._around(s.min_p, off=0.0)
    ]
    return min(sizes), max(sizes)


def check(isa: str, logits: F32, s: Settings) -> None:
    by_mode = {mode: describe(isa, logits, s, mode) for mode in Mode}
    assert len({one.token for one in by_mode.values()}) == 1, "what is told changes what is sampled"
    for mode, one in by_mode.items():
        assert one.value == one.values[one.token], mode
        assert one.rank == 1 + np.count_nonzero(one.values > one.values[one.token]), mode
        falling = one.values[one.order]
        assert (falling[1:] <= falling[:-1]).all(), mode

    raw = by_mode[Mode.RAW_LOGITS]
    assert raw.values.tobytes() == logits.tobytes()
    assert raw.order.tolist() == reference.in_order(reference.readable(logits)).tolist()
    np.testing.assert_allclose(
        by_mode[Mode.RAW_LOGPROBS].values, reference.logprobs(logits), rtol=2e-6, atol=2e-6
    )

    found = by_mode[Mode.PROCESSED_LOGITS].values
    possible = np.isfinite(found)
    if not possible.any():
        assert np.isneginf(reference.adjusted(logits, s)).all(), "nothing is left, though not all is banned"
        assert np.isneginf(by_mode[Mode.PROCESSED_LOGPROBS].values).all()
        return
    least, most = kept_counts(logits, s) if s.temperature >= 1e-5 else (0, logits.size)
    finite = np.isfinite(reference.adjusted(logits, s))
    assert min(least, finite.sum()) <= possible.sum() <= most
    expected = processed(logits, s, int(possible.sum()) if s.temperature >= 1e-5 else logits.size)
    assert possible.tolist() == np.isfinite(expected).tolist(), "others survive than the best"
    assert possible[raw.token]
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-6, atol=1e-6)
    normed = by_mode[Mode.PROCESSED_LOGPROBS].values
    np.testing.assert_allclose(normed[possible], log_softmax(expected[possible]), rtol=4e-6, atol=4e-6)
    assert np.isneginf(normed[~possible]).all()


@each_level
@settings(max_examples=60)
@given(row=rows())
def test_each_mode_tells_what_numpy_does(isa: str, row: tuple[F32, Settings]) -> None:
    check(isa, *row)


@each_level
@pytest.mark.parametrize("size", [1, 15, 16, 17, 5000])
def test_nothing_to_process_is_raw_to_the_bit(isa: str, size: int) -> None:
    logits, s = row_of(size, size), Settings(temperature=1.0, seed=4)
    for ours, theirs in (
        (Mode.PROCESSED_LOGITS, Mode.RAW_LOGITS),
        (Mode.PROCESSED_LOGPROBS, Mode.RAW_LOGPROBS),
    ):
        one, other = describe(isa, logits, s, ours), describe(isa, logits, s, theirs)
        assert one.values.tobytes() == other.values.tobytes()
        assert (one.token, one.rank, one.order.tolist()) == (other.token, other.rank, other.order.tolist())


@each_level
def test_a_greedy_row_is_not_divided_by_its_temperature(isa: str) -> None:
    s = Settings(temperature=0.0, top_k=1, top_p=0.1, bias_ids=[3, 5], bias_values=[2.0, -np.inf])
    logits = row_of(1, 300)
    found = describe(isa, logits, s, Mode.PROCESSED_LOGITS)
    assert found.values.tobytes() == reference.adjusted(logits, s).tobytes()
    assert found.rank == 1


@each_level
def test_a_single_survivor_is_certain(isa: str) -> None:
    found = describe(isa, row_of(2, 300), Settings(temperature=0.7, top_k=1), Mode.PROCESSED_LOGPROBS)
    assert (found.value, found.rank, int(np.isfinite(found.values).sum())) == (0.0, 1, 1)


@each_level
def test_a_row_of_nothing_has_nothing_in_any_mode(isa: str) -> None:
    logits = np.full(40, -np.inf, np.float32)
    for mode in Mode:
        assert np.isneginf(describe(isa, logits, Settings(), mode).values).all()


# ---- In the engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama")


PROMPT = [0, *[2 + index * 5 % 200 for index in range(40)]]


@cache
def asked(directory: Path, mode: str) -> RequestOutput:
    """A prompt and two tokens, every token's number at each position, under a bias and a filter."""
    params = SamplingParams(
        seed=3,
        max_tokens=2,
        ignore_eos=True,
        temperature=0.5,
        top_k=7,
        logit_bias={9: 3.0},
        logprobs=-1,
        prompt_logprobs=-1,
    )
    with LLM(directory, num_threads=1, max_logprobs=-1, logprobs_mode=mode, max_model_len=64) as llm:
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], params, use_tqdm=False)
    return output


def numbers(output: RequestOutput) -> tuple[F64, F64]:
    """By token id: of the prompt's positions but the first ``[P - 1, V]``, and of the tokens ``[2, V]``."""
    (completion,) = output.outputs
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    table = np.array(
        [[one[token].logprob for token in range(len(one))] for one in entries if one is not None]
    )
    return table[: len(PROMPT) - 1], table[len(PROMPT) - 1 :]


def test_a_prompt_is_told_of_as_it_is_in_every_mode(directory: Path) -> None:
    """Nothing is sampled from it, so nothing is processed."""
    prompts = {mode: numbers(asked(directory, mode))[0] for mode in LOGPROBS_MODES}
    assert prompts["raw_logprobs"].tolist() == prompts["processed_logprobs"].tolist()
    assert prompts["raw_logits"].tolist() == prompts["processed_logits"].tolist()
    for logits, logprobs in zip(prompts["raw_logits"], prompts["raw_logprobs"], strict=True):
        np.testing.assert_allclose(logprobs, log_softmax(logits), rtol=2e-6, atol=2e-6)
    assert (prompts["raw_logits"] > 0).any()


def test_what_is_sampled_is_told_of_as_the_mode_says(directory: Path) -> None:
    outputs = {mode: asked(directory, mode) for mode in LOGPROBS_MODES}
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1
    sampled = {mode: numbers(output)[1] for mode, output in outputs.items()}
    for at in range(2):
        raw = sampled["raw_logits"][at]
        biased = raw.copy()
        biased[9] += 3.0
        best = np.lexsort((np.arange(raw.size), -biased))[:7]
        expected = np.full(raw.size, -np.inf)
        expected[best] = biased[best] / 0.5
        np.testing.assert_allclose(sampled["processed_logits"][at], expected, rtol=1e-6)
        np.testing.assert_allclose(
            sampled["processed_logprobs"][at][best], log_softmax(expected[best]), rtol=4e-6, atol=4e-6
        )
        np.testing.assert_allclose(sampled["raw_logprobs"][at], log_softmax(raw), rtol=2e-6, atol=2e-6)
