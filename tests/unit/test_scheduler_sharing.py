"""Cached prefixes: who finds which, who waits for whom, and what is counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler_drive import BLOCK, SAMPLED, Drive, tokens_of

PROMPT = tokens_of("p", 10)  # two full blocks and a part


def test_a_later_request_finds_what_an_earlier_one_computed() -> None:
    drive = Drive()
    drive.add("a", PROMPT)
    drive.drain()
    b = drive.add("b", PROMPT)
    assert drive.step() == ["b 8:10*"]
    assert b.num_cached_tokens == 8
    c = drive.add("c", [*PROMPT[:5], *tokens_of("c", 5)])
    assert drive.step() == ["b 10:11*", "c 4:10*"]
    assert c.num_cached_tokens == 4
    assert drive.scheduler.counters.prefix_cache_queries == 30
    assert drive.scheduler.counters.prefix_cache_hits == 12


def test_running_requests_share_the_very_blocks() -> None:
    drive = Drive()
    a = drive.add("a", PROMPT, 9)
    drive.step()
    b = drive.add("b", PROMPT, 9)
    drive.step()
    assert a.block_ids[:2] == b.block_ids[:2]
    assert not set(a.block_ids[2:]) & set(b.block_ids[2:]), "a block that isn't full is nobody else's"
    drive.finish(a)
    assert drive.scheduler.pool.num_unheld(b.block_ids) == 0
    drive.drain()


def test_the_last_token_is_always_left_to_compute() -> None:
    drive = Drive()
    drive.add("a", PROMPT[:8])
    drive.drain()
    b = drive.add("b", PROMPT[:8])
    assert drive.step() == ["b 4:8*"]
    assert b.num_cached_tokens == 4


def test_blocks_filled_while_decoding_are_found_too() -> None:
    drive = Drive()
    a = drive.add("a", PROMPT, 8)
    drive.drain()
    assert a.num_tokens == 18
    drive.add("b", [*PROMPT, *[SAMPLED] * 8])
    # Seventeen positions of a were computed: its last token was never fed back.
    assert drive.step() == ["b 16:18*"]


def test_a_position_under_way_is_no_hit() -> None:
    drive = Drive(depth=2)
    drive.add("a", PROMPT, 9)
    drive.submit()
    drive.add("b", [*PROMPT[:4], *tokens_of("b", 3)])
    assert drive.submit() == ["a 10:11~*"], "b waits for what a computes just now"
    assert drive.scheduler.waiting.num_parked == 1
    drive.land()
    assert drive.submit() == ["a 11:12~*", "b 4:7*"]
    drive.drain()


def test_completions_of_one_prompt_compute_it_once() -> None:
    drive = Drive()
    for name in "abc":
        drive.add(name, PROMPT)
    assert drive.step() == ["a 0:10*"]
    assert drive.scheduler.waiting.num_parked == 0, "the blocks are there"
    assert drive.step() == ["a 10:11*", "b 8:10*", "c 8:10*"]
    # Had they been computed apart, there would be 30 rows of prompts.
    drive.drain()
    assert drive.num_rows == 14 + 3 * 3


def test_a_prompt_in_chunks_is_waited_for_to_its_last_full_block() -> None:
    drive = Drive(budget=5)
    drive.add("a", PROMPT)
    drive.add("b", PROMPT)
    drive.add("c", 3)
    assert drive.step() == ["a 0:5"]
    # c, which waits for nothing, has the rows that a leaves.
    assert drive.step() == ["a 5:10*"]
    assert drive.step() == ["a 10:11*", "b 8:10*", "c 0:2"]
    drive.drain()


def test_one_who_waits_for_a_block_is_overtaken_by_those_who_need_none() -> None:
    drive = Drive(budget=12, seqs=4)
    drive.add("a", 8, 1)
    drive.add("b", tokens_of("a", 8), 1)
    drive.add("c", 4, 1)
    assert drive.step() == ["a 0:8*", "c 0:4*"]
    assert drive.step() == ["b 4:8*"]


def test_others_share_as_far_as_their_prompts_agree() -> None:
    drive = Drive()
    a = drive.add("a", [*PROMPT[:4], *tokens_of("a", 8)])
    b = drive.add("b", [*PROMPT[:4], *tokens_of("b", 8)])
    assert drive.step() == ["a 0:12*"]
    assert drive.step() == ["a 12:13*", "b 4:12*"]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 4)


def test_no_more_wait_for_a_block_than_can_run() -> None:
    drive = Drive(seqs=3)
    for name in "abcdef":
        drive.add(name, tokens_of("p", 20), 1)
    drive.add("g", 4, 1)
    assert drive.submit() == ["a 0:20*"], "g would take the place of one who came before it"
    assert drive.scheduler.waiting.num_parked == 2
    drive.land()
    assert drive.step() == ["b 16:20*", "c 16:20*", "d 16:20*"]
    assert drive.step() == ["e 16:20*", "f 16:20*", "g 0:4*"]


def test_a_better_ranked_request_never_waits_for_a_worse_ranked_one() -> None:
    drive = Drive(policy="priority", budget=8)
    drive.add("b", tokens_of("p", 16), priority=1)
    assert drive.step() == ["b 0:8"]
    a = drive.add("a", tokens_of("p", 16), priority=0)
    assert drive.step() == ["a 8:16*"], "it has what is there, and computes the rest"
    assert a.num_cached_tokens == 8
    assert drive.step() == ["a 16:17*", "b 8:15"]
    drive.drain()


def test_a_better_ranked_request_does_not_wait_behind_one_that_waits_for_a_block() -> None:
    drive = Drive(depth=2, policy="priority", seqs=2)
    drive.add("b", tokens_of("p", 20), priority=1)
    drive.add("c", tokens_of("p", 20), priority=1)
    assert drive.submit() == ["b 0:20*"]
    assert drive.scheduler.waiting.num_parked == 1
    drive.add("a", 4, 1, priority=0)
    assert drive.submit() == ["a 0:4*", "b 20:21~*"]
    drive.drain()


def test_a_better_ranked_request_takes_the_slot_of_one_that_is_waited_for() -> None:
    drive = Drive(depth=2, policy="priority", seqs=1)
    b = drive.add("b", tokens_of("p", 20), priority=1)
    drive.add("c", tokens_of("p", 20), priority=1)
    drive.submit()
    a = drive.add("a", tokens_of("p", 20), priority=0)
    while not a.finished:
        drive.step()
    assert b.num_preemptions == 1
    drive.drain()


def test_an_abort_of_whoever_computes_frees_those_who_wait() -> None:
    drive = Drive(budget=6)
    a = drive.add("a", PROMPT)
    drive.add("b", PROMPT)
    drive.add("c", PROMPT)
    assert drive.step() == ["a 0:6"]
    assert drive.scheduler.waiting.num_parked == 0, "there was no row to look at them for"
    assert drive.step() == ["a 6:10*"]
    drive.finish(a)
    assert drive.step() == ["b 8:10*", "c 8:10*"]


def test_a_broken_promise_is_kept_by_the_next() -> None:
    drive = Drive(budget=6, prefill=2)
    drive.add("z", 1, 30)
    drive.step()
    a = drive.add("a", PROMPT)
    b = drive.add("b", PROMPT)
    assert drive.step() == ["z 1:2*", "a 0:2"]
    drive.scheduler.options = drive.scheduler.options.__class__()
    drive.step()
    assert a.num_computed_tokens == 7
    assert drive.running == "za"
    drive.finish(a)
    assert drive.step() == ["z 3:4*", "b 4:9"]
    assert b.num_cached_tokens == 4
    drive.drain()


def test_giving_way_breaks_a_promise_too() -> None:
    drive = Drive(policy="priority", budget=8, length=32, blocks=8, seqs=3)
    b = drive.add("b", tokens_of("p", 24), 2, priority=1)
    drive.add("c", tokens_of("p", 24), 2, priority=2)
    assert drive.step() == ["b 0:8"]
    drive.add("a", 28, 1, priority=0)
    while b.num_preemptions == 0:
        drive.step()
    assert not [owner for owner in drive.scheduler.promises.values() if owner is b]
    drive.drain()


def test_salts_share_nothing() -> None:
    drive = Drive()
    requests = [
        drive.add(name, PROMPT, 1, salt=salt)
        for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", None))
    ]
    assert drive.step() == ["a 0:10*", "b 0:10*", "c 0:10*"], "those of one salt wait for each other"
    assert drive.step() == ["d 8:10*", "e 8:10*"]
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 8, 8]


def test_nothing_of_before_a_reset_is_found_after_it() -> None:
    drive = Drive(budget=8)
    drive.add("a", tokens_of("p", 20), 9)
    drive.step()
    drive.scheduler.reset_prefix_cache()
    drive.check()
    assert drive.scheduler.pool.num_cached_blocks == 0
    while drive.scheduler.running[0].num_computed_tokens < 22:
        drive.step()
    b = drive.add("b", tokens_of("p", 20), 9)
    drive.step()
    assert b.num_cached_tokens == 0
    drive.drain()
    c = drive.add("c", tokens_of("p", 20), 1)
    drive.step()
    assert c.num_cached_tokens == 16


def test_one_who_waits_for_a_block_looks_anew_after_a_reset() -> None:
    drive = Drive(budget=8)
    drive.add("a", tokens_of("p", 20), 2)
    b = drive.add("b", tokens_of("p", 20), 2)
    drive.step()
    drive.scheduler.reset_prefix_cache()
    drive.drain()
    assert b.num_cached_tokens == 0


def test_without_prefix_caching_everybody_computes_everything() -> None:
    drive = Drive(caching=False)
    for name in "abc":
        drive.add(name, PROMPT, 3)
    assert drive.step() == ["a 0:10*", "b 0:10*", "c 0:10*"]
    drive.drain()
    assert drive.num_rows == 3 * 12
    counters = drive.scheduler.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (0, 0)
    assert drive.scheduler.pool.num_cached_blocks == 0


def test_evicted_blocks_are_computed_again() -> None:
    drive = Drive(length=16, blocks=4)
    drive.add("a", 12, 1)
    drive.drain()
    drive.add("b", 8, 1)
    drive.drain()
    # b took the blank block and a's last one.
    assert drive.scheduler.pool.num_evictions == 1
    drive.add("a", 12, 1)
    assert drive.step() == ["a 8:12*"]


@settings(max_examples=60)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 2)), max_size=9),
    depth=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "priority"]),
    seqs=st.integers(1, 5),
    blocks=st.integers(8, 20),
)
def test_prompts_that_share_all_finish_and_never_compute_more(
    prompts: list[tuple[int, int, int]], depth: int, policy: str, seqs: int, blocks: int
) -> None:
    """Three families of prompts, every one the beginning of the longest of its family."""
    drive = Drive(depth=depth, policy=policy, seqs=seqs, length=32, blocks=blocks, budget=9)
    for index, (family, length, priority) in enumerate(prompts):
        drive.add(chr(97 + index), tokens_of(str(family), length), 6, priority=priority)
        drive.step()
    drive.drain()
    work = sum(length + 5 for _, length, _ in prompts)
    if not drive.scheduler.counters.num_preemptions:
        assert drive.num_rows == work - drive.scheduler.counters.prefix_cache_hits
    assert drive.scheduler.counters.prefix_cache_hits % BLOCK == 0
