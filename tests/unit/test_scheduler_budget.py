"""Who gets how many rows of a step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler_drive import Drive, shown


def test_a_long_prompt_is_split_by_the_budget() -> None:
    drive = Drive(budget=16)
    drive.add("a", 40, 2)
    assert [drive.step() for _ in range(4)] == [["a 0:16"], ["a 16:32"], ["a 32:40*"], ["a 40:41*"]]
    assert drive.drain() == 0


def test_decodes_and_prompts_share_one_budget() -> None:
    drive = Drive(budget=16)
    drive.add("a", 4)
    drive.add("b", 30)
    assert drive.step() == ["a 0:4*", "b 0:12"]
    assert drive.step() == ["a 4:5*", "b 12:27"]
    assert drive.step() == ["a 5:6*", "b 27:30*"]


def test_the_first_to_come_are_served_first_when_the_budget_is_short() -> None:
    drive = Drive(budget=2)
    for name in "abcd":
        drive.add(name, 1, 2)
    assert drive.step() == ["a 0:1*", "b 0:1*"]
    assert drive.step() == ["a 1:2*", "b 1:2*"]
    assert drive.step() == ["c 0:1*", "d 0:1*"]


def test_slots_bound_how_many_run() -> None:
    drive = Drive(seqs=2)
    for name in "abc":
        drive.add(name, 1, 1)
    assert drive.step() == ["a 0:1*", "b 0:1*"]
    assert drive.step() == ["c 0:1*"]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["a", "b", "c", "d"]), ("priority", ["b", "d", "a", "c"])]
)
def test_the_policy_decides_who_goes_first(policy: str, order: list[str]) -> None:
    drive = Drive(policy=policy, budget=1)
    for name, priority in (("a", 5), ("b", -2), ("c", 5), ("d", 0)):
        drive.add(name, 1, 1, priority=priority)
    assert [drive.step() for _ in range(4)] == [[f"{name} 0:1*"] for name in order]


def test_a_better_ranked_newcomer_goes_first_and_moves_nobody_out() -> None:
    drive = Drive(policy="priority", budget=8)
    drive.add("a", 20, priority=1)
    assert drive.step() == ["a 0:8"]
    drive.add("b", 6, priority=0)
    assert drive.step() == ["b 0:6*", "a 8:10"]
    assert drive.running == "ba"


def test_prompts_are_capped_while_others_decode() -> None:
    drive = Drive(prefill=8)
    drive.add("a", 4, 3)
    drive.add("b", 30)
    drive.add("c", 1, 1)
    # Nobody decodes yet, so nothing is held back.
    assert drive.step() == ["a 0:4*", "b 0:30*", "c 0:1*"]
    drive.add("d", 40)
    assert drive.step() == ["a 4:5*", "b 30:31*", "d 0:8"]
    drive.add("e", 40)
    assert drive.step() == ["a 5:6*", "b 31:32*", "d 8:16"]
    assert drive.running == "bd", "without rows for it, nobody is let in"
    assert drive.step() == ["b 32:33*", "d 16:24"]
    assert drive.step() == ["d 24:40*", "e 0:40*"]


def test_the_cap_is_shared_by_all_prompts() -> None:
    drive = Drive(prefill=8)
    drive.add("a", 1, 9)
    drive.step()
    drive.add("b", 6)
    drive.add("c", 6)
    assert drive.step() == ["a 1:2*", "b 0:6*", "c 0:2"]
    assert drive.step() == ["a 2:3*", "b 6:7*", "c 2:6*"]


def test_a_long_prompt_never_holds_decodes_up() -> None:
    """Not even one that goes first and would take the whole budget."""
    drive = Drive(policy="priority", budget=16)
    for name in "abcdef":
        drive.add(name, 1, 20)
    drive.step()
    drive.add("p", 50, priority=-1)
    assert drive.step()[0] == "p 0:10"
    assert len(drive.step()) == 7
    assert drive.scheduler.counters.num_sat_out_steps == 0


@pytest.mark.parametrize(("budget", "share"), [(8, 2), (4, 1), (2, 1)])
def test_a_quarter_of_the_budget_is_left_for_prompts(budget: int, share: int) -> None:
    drive = Drive(policy="priority", budget=budget, seqs=9)
    names = "abcdefgh"[:budget]
    for name in names:
        drive.add(name, 1, 20)
    drive.step()
    drive.add("p", 12, priority=-1)
    assert drive.step() == [f"p 0:{share}", *(f"{name} 1:2*" for name in names[: budget - share])]
    assert drive.scheduler.counters.num_sat_out_steps == share


def test_under_fcfs_decodes_come_before_a_newcomers_prompt() -> None:
    drive = Drive(budget=4)
    for name in "abcd":
        drive.add(name, 1, 3)
    drive.step()
    drive.add("p", 9)
    assert drive.step() == [f"{name} 1:2*" for name in "abcd"]
    assert drive.step() == [f"{name} 2:3*" for name in "abcd"]
    assert drive.step() == ["p 0:4"]


def test_a_budget_of_one_still_moves_everybody_on() -> None:
    drive = Drive(budget=1, prefill=1)
    for name in "abc":
        drive.add(name, 9, 3)
    assert drive.drain() == 3 * (9 + 2)


def test_rows_ahead_of_their_results_carry_the_token_over() -> None:
    drive = Drive(depth=2)
    drive.add("a", 5, 3)
    assert drive.step() == ["a 0:5*"]
    assert drive.step() == ["a 5:6~*"]
    assert drive.step() == ["a 6:7~*"]
    assert drive.step() == [], "its last token is under way"
    assert drive.drain() == 0


def test_a_request_that_sat_out_a_step_takes_its_token_from_the_host() -> None:
    drive = Drive(depth=2, policy="priority", budget=4, seqs=5)
    for name in "abcd":
        drive.add(name, 1, 9)
    drive.step()
    drive.add("p", 1, 2, priority=-1)
    assert drive.step() == ["p 0:1*", "a 1:2~*", "b 1:2~*", "c 1:2~*"]
    assert drive.step() == ["p 1:2~*", "a 2:3~*", "b 2:3~*", "c 2:3~*"]
    assert drive.step() == ["a 3:4~*", "b 3:4~*", "c 3:4~*", "d 1:2*"]
    assert drive.scheduler.counters.num_sat_out_steps == 2


SIZES = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(-1, 1), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


DRIVES = st.builds(
    Drive,
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.integers(1, 2),
    caching=st.booleans(),
    budget=st.integers(1, 40),
    prefill=st.integers(1, 20),
    seqs=st.integers(1, 6),
    length=st.just(48),
    blocks=st.integers(12, 40),
)


@settings(max_examples=60)
@given(SIZES, DRIVES)
def test_whatever_the_limits_each_step_keeps_to_them_and_all_finish(
    sizes: list[tuple[int, int, int, int]], drive: Drive
) -> None:
    prefill = drive.scheduler.options.max_num_prefill_tokens
    work = 0
    for index, (num_prompt, max_tokens, priority, gap) in enumerate(sizes):
        drive.add(chr(97 + index), num_prompt, max_tokens, priority=priority)
        work += num_prompt + max_tokens
        for _ in range(gap):
            _checked_step(drive, prefill)
    # Every step moves the best-ranked on, unless it waits for one under way.
    for _ in range(3 * work + 10):
        _checked_step(drive, prefill)
    assert not drive.scheduler.has_unfinished()
    drive.drain()
    if not drive.scheduler.counters.num_preemptions:
        # No two share a prefix, so each position was computed once.
        assert drive.num_rows == work - len(sizes)


def _checked_step(drive: Drive, prefill: int) -> None:
    some_decode = any(request.num_missing_tokens == 1 for request in drive.scheduler.running)
    chunks = drive.flights[-1] if drive.submit() else []
    assert len({chunk.request.rank for chunk in chunks}) == len(chunks), list(map(shown, chunks))
    prompts = [chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1 or not chunk.samples]
    assert not some_decode or sum(prompts) <= prefill
    while drive.flights and (not chunks or len(drive.flights) == drive.depth):
        drive.land()
