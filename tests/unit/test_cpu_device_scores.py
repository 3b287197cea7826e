"""Scores of the CPU device: from hidden states of this step or earlier ones, any number at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests import reference_sampler as reference
from tests.exactness.drive import Rows, batch_of, greedy, make_device
from tests.tiny_models import TINY

from loadproof import _native
from loadproof.devices.cpu import CpuDevice
from loadproof.devices.device import DeviceLimits, ScoreBatch, ScoreResult, StepBatch, no_rows

MODEL = TINY["llama"]
VOCAB_SIZE = MODEL.graph.vocab_size
LIMITS = DeviceLimits(max_num_batched_tokens=8, max_num_seqs=3, max_model_len=40, block_size=16, num_blocks=4)
TOKENS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 200).tolist()


def scores(hidden: Sequence[int], targets: Sequence[int], tops: Sequence[int]) -> ScoreBatch:
    return ScoreBatch(*(np.array(values, np.int32) for values in (hidden, targets, tops)))


def rowless(wanted: ScoreBatch) -> StepBatch:
    """A step that only scores."""
    none = no_rows()
    tables = np.zeros((0, 0), np.int32)
    return StepBatch(none, np.zeros(1, np.int32), none, tables, none, greedy(0), scores=wanted)


def found(device: CpuDevice, batch: StepBatch) -> ScoreResult:
    result = device.execute(batch)
    assert result.scores is not None
    assert len(result.token_ids) == len(batch.logits_rows)
    return result.scores


def as_bytes(one: ScoreResult) -> tuple[bytes, ...]:
    return tuple(a.tobytes() for a in (one.logprobs, one.ranks, one.top_ids, one.top_logprobs))


@pytest.fixture(params=[(isa, threads) for isa in _native.available_levels() for threads in (1, 3)], ids=str)
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    isa, threads = request.param
    made = make_device(MODEL.graph, MODEL.source, isa, num_threads=threads, max_rows=200)
    yield made
    made.close()


BLOCKS = [7, 2, 9, 4, 30, 11, 12, 13, 14, 15, 16, 17, 18]
HIDDEN = [BLOCKS[at // 16] * 16 + at % 16 for at in range(200)]


def test_scores_are_those_of_the_logits(device: CpuDevice) -> None:
    """All at once, in one step with the rows, in one without, and one by one: more than go at a time."""
    targets = [*TOKENS[1:], 0]
    tops = [at % 4 for at in range(200)]
    wanted = scores(HIDDEN, targets, tops)
    whole = batch_of([Rows(TOKENS, 0, 200, BLOCKS)])
    result = device.execute(replace(whole, scores=wanted))
    assert result.scores is not None
    assert result.logits is not None
    start = 0
    for at, (logits, target, top) in enumerate(zip(result.logits, targets, tops, strict=True)):
        exact = reference.logprobs(logits)
        assert abs(result.scores.logprobs[at] - exact[target]) < 1e-5
        assert result.scores.ranks[at] == reference.rank(logits, target)
        best = reference.in_order(reference.readable(logits))[:top]
        assert result.scores.top_ids[start : start + top].tolist() == best.tolist()
        np.testing.assert_allclose(result.scores.top_logprobs[start : start + top], exact[best], atol=1e-5)
        start += top
    later = found(device, rowless(wanted))
    assert as_bytes(later) == as_bytes(result.scores)
    singly = [
        found(device, rowless(scores(HIDDEN[at : at + 1], targets[at : at + 1], tops[at : at + 1])))
        for at in range(0, 200, 23)
    ]
    for at, one in zip(range(0, 200, 23), singly, strict=True):
        assert one.logprobs.tobytes() == result.scores.logprobs[at].tobytes()


def test_what_was_sampled_is_what_is_scored(device: CpuDevice) -> None:
    """A row's log-probabilities and its score are the same bits, though the one reads no hidden state."""
    batch = batch_of([Rows(TOKENS, 0, 50, BLOCKS)])
    sampled = device.execute(
        replace(batch, sampling=replace(batch.sampling, num_logprobs=np.full(50, 3, np.int32)))
    )
    again = found(device, rowless(scores(HIDDEN[:50], sampled.token_ids.tolist(), [3] * 50)))
    for at, row in enumerate(sampled.logprobs):
        assert row is not None
        assert row.token_logprob == again.logprobs[at]
        assert row.token_rank == again.ranks[at]
        assert row.top_ids.tolist() == again.top_ids[3 * at : 3 * at + 3].tolist()
        assert row.top_logprobs.tobytes() == again.top_logprobs[3 * at : 3 * at + 3].tobytes()


@pytest.fixture(scope="module")
def small() -> Iterator[CpuDevice]:
    made = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bare() -> Iterator[CpuDevice]:
    made = CpuDevice(MODEL.graph, MODEL.source, replace(LIMITS, keeps_hidden=False), num_threads=2)
    yield made
    made.close()


FIVE = batch_of([Rows([1, 2, 3], 0, 3, [2, 0]), Rows([4, 5], 0, 2, [1])], np.array([2, 4], np.int32))
GOOD = scores([32, 34, 17], [5, 6, 7], [0, 2, 1])
MALFORMED: dict[str, tuple[ScoreBatch, str]] = {
    "hidden state beyond the cache": (scores([64], [1], [0]), "hidden state is outside the cache"),
    "negative hidden state": (scores([-1], [1], [0]), "hidden state is outside the cache"),
    "token beyond the vocabulary": (scores([0], [VOCAB_SIZE], [0]), "token is outside the vocabulary"),
    "negative token": (scores([0], [-1], [0]), "token is outside the vocabulary"),
    "more tokens than there are": (scores([0], [1], [VOCAB_SIZE + 1]), "more tokens than the vocabulary"),
    "fewer than no tokens": (scores([0], [1], [-1]), "more tokens than the vocabulary"),
    "more than the budget": (scores([0] * 9, [1] * 9, [0] * 9), "more scores than max_num_batched_tokens"),
    "a row without a token": (scores([0, 1], [1], [0, 0]), "one row, one token and one count each"),
    "a token without a row": (scores([0], [1, 2], [0, 0]), "one row, one token and one count each"),
    "a row without a count": (scores([0, 1], [1, 2], [0]), "one row, one token and one count each"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("with_rows", [True, False])
def test_malformed_scores_are_refused_and_leave_no_trace(
    small: CpuDevice, name: str, *, with_rows: bool
) -> None:
    before = as_bytes(found(small, replace(FIVE, scores=GOOD)))
    wrong, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        small.submit(replace(FIVE, scores=wrong) if with_rows else rowless(wrong))
    assert as_bytes(found(small, rowless(GOOD))) == before
    assert as_bytes(found(small, replace(FIVE, scores=GOOD))) == before


def test_a_step_of_nothing_is_refused(small: CpuDevice) -> None:
    for nothing in (rowless(scores([], [], [])), replace(rowless(GOOD), scores=None)):
        with pytest.raises(ValueError, match="from 1 to max_num_batched_tokens tokens"):
            small.submit(nothing)


def test_without_kept_hidden_states_rows_of_the_step_are_scored(small: CpuDevice, bare: CpuDevice) -> None:
    kept = found(small, replace(FIVE, scores=GOOD))
    assert as_bytes(found(bare, replace(FIVE, scores=scores([0, 2, 4], [5, 6, 7], [0, 2, 1])))) == as_bytes(
        kept
    )
    with pytest.raises(ValueError, match="hidden state is outside the cache"):
        bare.submit(replace(FIVE, scores=scores([5], [1], [0])))
    with pytest.raises(ValueError, match="hidden state is outside the cache"):
        bare.submit(rowless(scores([0], [1], [0])))


def test_steps_with_and_without_rows_follow_each_other(small: CpuDevice) -> None:
    expected: Any = as_bytes(found(small, replace(FIVE, scores=GOOD)))
    steps = [small.submit(rowless(GOOD) if at % 3 else replace(FIVE, scores=GOOD)) for at in range(9)]
    for step in steps:
        result = step.result()
        assert result.scores is not None
        assert as_bytes(result.scores) == expected
