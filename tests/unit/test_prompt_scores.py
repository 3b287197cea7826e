"""What of a prompt has been scored, what is missing, and what is kept with blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadproof.devices.device import I64, ScoreResult
from loadproof.engine.block_pool import BlockKey, BlockPool
from loadproof.engine.invariant import IntegrityError
from loadproof.engine.prompt_scores import BlockScores, PromptScores

BLOCK = 4


def found(positions: I64, num_top: int) -> ScoreResult:
    """A result that tells positions apart."""
    at = positions.astype(np.float32)
    tops = np.add.outer(10 * positions, np.arange(num_top)).astype(np.int32).reshape(-1)
    return ScoreResult(-at, positions.astype(np.int32) + 1, tops, -tops.astype(np.float32))


def score(scores: PromptScores, *positions: int) -> None:
    """Submit these and bring their results."""
    there = np.array(positions, np.int64)
    scores.submit(there)
    scores.record(there, found(there, scores.num_top))


def scored(num_tokens: int, num_top: int = 2, first: int = 0) -> PromptScores:
    scores = PromptScores(list(range(first, first + num_tokens)), num_top)
    score(scores, *range(num_tokens - 1))
    return scores


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_a_prompt_of_one_token_has_nothing_to_score(num_top: int) -> None:
    scores = PromptScores([7], num_top)
    assert scores.done
    assert scores.missing(0).tolist() == []
    assert scores.num_done_from_start() == 0
    assert scores.top_ids.shape == (0, num_top)
    assert scores.block(0, BLOCK) is None


def test_positions_are_missing_until_they_are_submitted() -> None:
    scores = PromptScores(list(range(10)), 1)
    assert scores.targets.tolist() == list(range(1, 10))
    assert scores.missing(4).tolist() == [0, 1, 2, 3]
    score(scores, 0, 1)
    scores.submit(np.array([2, 3]))
    assert scores.missing(4).tolist() == []
    assert scores.missing(6).tolist() == [4, 5]
    assert scores.num_done_from_start() == 2
    scores.forget_submitted()
    assert scores.missing(6).tolist() == [2, 3, 4, 5]
    score(scores, *range(2, 9))
    assert scores.done
    assert scores.missing(9).tolist() == []
    assert scores.num_done_from_start() == 9
    assert scores.logprobs.tolist() == [-float(at) for at in range(9)]
    assert scores.ranks.tolist() == list(range(1, 10))
    assert scores.top_ids.tolist() == [[10 * at] for at in range(9)]


def test_results_need_not_come_for_positions_in_a_row() -> None:
    scores = PromptScores(list(range(8)), 3)
    score(scores, 1, 4, 6)
    assert scores.missing(7).tolist() == [0, 2, 3, 5]
    score(scores, 0, 2, 3, 5)
    assert scores.done
    assert scores.top_ids[:, 2].tolist() == [10 * at + 2 for at in range(7)]


@given(st.lists(st.tuples(st.sampled_from(["submit", "land", "lose"]), st.integers(0, 12)), max_size=40))
def test_nothing_is_lost_or_scored_twice(events: list[tuple[str, int]]) -> None:
    """Against sets: what is missing is what was neither brought nor is on its way."""
    scores = PromptScores(list(range(13)), 1)
    done: set[int] = set()
    flights: list[list[int]] = []
    for event, size in events:
        if event == "submit":
            positions = scores.missing(size)[: size // 2 + 1]
            if len(positions):
                scores.submit(positions)
                flights.append(positions.tolist())
        elif event == "land" and flights:
            landed = np.array(flights.pop(0))
            scores.record(landed, found(landed, 1))
            done |= set(landed.tolist())
        elif event == "lose":
            scores.forget_submitted()
            flights.clear()
        covered = done.union(*flights)
        for stop in (12, size):
            assert scores.missing(stop).tolist() == [at for at in range(stop) if at not in covered]
        assert scores.done == (len(done) == 12)
        assert scores.num_done_from_start() == next(at for at in range(13) if at not in done)


def test_a_block_is_kept_once_all_of_it_is_scored() -> None:
    scores = PromptScores(list(range(10)), 2)
    score(scores, 0, 1, 2)
    assert scores.block(0, BLOCK) is None
    scores.submit(np.array([3]))
    assert scores.block(0, BLOCK) is None
    scores.record(np.array([3]), found(np.array([3]), 2))
    block = scores.block(0, BLOCK)
    assert block is not None
    assert (block.next_token, block.num_top) == (4, 2)
    assert block.logprobs.tolist() == [0.0, -1.0, -2.0, -3.0]
    score(scores, *range(4, 9))
    last = scores.block(4, BLOCK)
    assert last is not None
    assert (last.next_token, last.ranks.tolist()) == (8, [5, 6, 7, 8])
    assert scores.block(8, BLOCK) is None, "its end is not in the prompt"


def test_a_full_block_at_the_end_of_a_prompt_lacks_its_last_score() -> None:
    """It serves the same prompt again, and one that goes on but for the token it goes on with."""
    assert scored(7).block(4, BLOCK) is None, "the prompt does not fill it"
    block = scored(8).block(4, BLOCK)
    assert block is not None
    assert (block.next_token, block.logprobs.tolist()) == (None, [-4.0, -5.0, -6.0])
    for num_tokens, missing in ((7, []), (8, []), (9, [7]), (11, [7, 8, 9])):
        other = PromptScores(list(range(num_tokens)), 2)
        score(other, 0, 1, 2, 3)
        other.copy_block(4, block)
        assert other.missing(num_tokens - 1).tolist() == missing
        assert other.logprobs[4:7].tolist() == [-4.0, -5.0, -6.0][: num_tokens - 5]
    partly = PromptScores(list(range(8)), 1)
    score(partly, 4, 5)
    assert partly.block(4, BLOCK) is None


def test_what_is_kept_is_a_copy() -> None:
    scores = scored(9)
    block = scores.block(0, BLOCK)
    assert block is not None
    for ours, theirs in (
        (block.logprobs, scores.logprobs),
        (block.ranks, scores.ranks),
        (block.top_ids, scores.top_ids),
        (block.top_logprobs, scores.top_logprobs),
    ):
        assert not np.shares_memory(ours, theirs)
        assert ours.base is None, "a view would keep the whole prompt's scores alive"


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_block_serves_those_who_want_no_more_of_it(wanted: int) -> None:
    block = scored(9).block(0, BLOCK)
    assert block is not None
    other = PromptScores(list(range(7)), wanted)
    other.copy_block(0, block)
    assert other.missing(6).tolist() == [4, 5]
    assert other.num_done_from_start() == 4
    assert other.logprobs[:4].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert other.top_ids[:4].tolist() == [[10 * at + top for top in range(wanted)] for at in range(4)]
    score(other, 4, 5)
    assert other.done


def test_a_block_does_not_serve_those_who_want_more() -> None:
    block = scored(9).block(0, BLOCK)
    assert block is not None
    other = PromptScores(list(range(7)), 3)
    other.copy_block(0, block)
    assert other.missing(6).tolist() == list(range(6))


def test_the_token_after_a_block_is_scored_anew_where_it_is_another() -> None:
    block = scored(9).block(0, BLOCK)
    assert block is not None
    other = PromptScores([0, 1, 2, 3, 99, 5], 2)
    other.copy_block(0, block)
    assert other.missing(5).tolist() == [3, 4]


def test_a_block_serves_a_prompt_that_ends_in_it() -> None:
    block = scored(9).block(0, BLOCK)
    assert block is not None
    for num_tokens in (1, 2, 3, 4):
        other = PromptScores(list(range(num_tokens)), 2)
        other.copy_block(0, block)
        assert other.done
        assert other.logprobs.tolist() == [-float(at) for at in range(num_tokens - 1)]


def test_a_later_block_lands_in_its_place() -> None:
    block = scored(9).block(4, BLOCK)
    assert block is not None
    other = PromptScores(list(range(9)), 1)
    other.copy_block(4, block)
    assert other.missing(8).tolist() == [0, 1, 2, 3]
    score(other, 0, 1, 2, 3)
    assert other.logprobs.tolist() == [-float(at) for at in range(8)]


def _kept(num_top: int) -> BlockScores:
    block = scored(9, num_top).block(0, BLOCK)
    assert block is not None
    return block


def _key(name: str) -> BlockKey:
    return BlockKey(name.encode(), b"")


def test_the_pool_keeps_the_most_that_is_known_of_a_block() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep_scores(block, _kept(1))
    assert pool.scores_of(block) is None, "nobody could find it"
    pool.publish(block, _key("a"))
    for num_top, most in ((1, 1), (0, 1), (5, 5), (2, 5)):
        pool.keep_scores(block, _kept(num_top))
        kept = pool.scores_of(block)
        assert kept is not None
        assert kept.num_top == most
    pool.check_integrity()


def test_the_pool_keeps_scores_that_reach_the_next_block() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, _key("a"))
    whole, short = _kept(1), scored(4, 1).block(0, BLOCK)
    assert short is not None
    for scores, kept in ((short, short), (whole, whole), (short, whole)):
        pool.keep_scores(block, scores)
        assert pool.scores_of(block) is kept
    wide = scored(4, 2).block(0, BLOCK)
    assert wide is not None
    pool.keep_scores(block, wide)
    assert pool.scores_of(block) is wide, "more of the best tokens count for more than one position"


def test_scores_go_with_what_they_are_about() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, _key("a"))
    pool.keep_scores(block, _kept(1))
    pool.release([block])
    assert pool.scores_of(block) is not None
    assert pool.allocate(1) == [block]  # evicted
    assert pool.scores_of(block) is None
    for forget in (pool.forget, pool.clear):
        if not pool.num_holders(block):
            pool.allocate(1)
        pool.publish(block, _key("b"))
        pool.keep_scores(block, _kept(1))
        forget()
        assert pool.scores_of(block) is None
        pool.check_integrity()


def test_scores_of_an_unpublished_block_are_a_fault() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, _key("a"))
    pool.keep_scores(block, _kept(1))
    pool._scores[1 - block] = _kept(1)
    with pytest.raises(IntegrityError, match="scores are kept of a block without a key"):
        pool.check_integrity()
    del pool._scores[1 - block]
    pool.check_integrity()


@given(st.integers(1, 20), st.integers(0, 8), st.integers(0, 3))
def test_of_any_block_what_lies_in_the_prompt_is_taken(num_tokens: int, index: int, num_top: int) -> None:
    """Blocks beyond the prompt hold what its request generated, which another's prompt may cover."""
    first = index * BLOCK
    block = scored(60, num_top).block(first, BLOCK)
    assert block is not None
    scores = PromptScores(list(range(num_tokens)), num_top)
    scores.copy_block(first, block)
    taken = sorted(set(range(num_tokens - 1)) - set(scores.missing(num_tokens - 1).tolist()))
    assert taken == list(range(first, min(first + BLOCK, num_tokens - 1)))
    assert scores.logprobs[taken].tolist() == [-position for position in taken]
