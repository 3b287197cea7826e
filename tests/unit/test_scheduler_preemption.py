"""Who gives way when blocks or slots run out, and how it goes on afterwards."""

from __future__ import annotations

import pytest
from tests.unit.scheduler_drive import BLOCK, SAMPLED, Drive, tokens_of

from loadproof.engine.request import RequestStatus


def _squeezed(names: str = "ab", **settings: object) -> Drive:
    """Requests that hold two full blocks each, which are all there are, and need a third."""
    drive = Drive(length=16, blocks=2 * len(names), **settings)  # type: ignore[arg-type]
    for place, name in enumerate(names):
        drive.add(name, 3, 8, priority=place)
    while drive.num_rows < 8 * len(names):
        drive.step()
    assert (drive.running, drive.free) == (names, 0)
    return drive


def test_nobody_gives_way_to_itself_or_to_a_worse_ranked_one() -> None:
    drive = Drive(length=16, blocks=5)
    a, b = drive.add("a", 7, 6), drive.add("b", 7, 6)
    assert drive.step() == ["a 0:7*", "b 0:7*"]
    assert drive.step() == ["a 7:8*", "b 7:8*"]
    assert drive.step() == ["a 8:9*"], "there is one block, and a comes first; b waits for its turn"
    assert [drive.step() for _ in range(3)] == [["a 9:10*"], ["a 10:11*"], ["a 11:12*"]]
    assert a.finished
    assert drive.step() == ["b 8:9*"]
    assert (b.num_preemptions, drive.scheduler.counters.num_sat_out_steps) == (0, 4)


def test_a_better_ranked_request_takes_a_worse_ranked_ones_blocks() -> None:
    drive = _squeezed()
    a, b = drive.scheduler.running
    assert drive.step() == ["a 8:9*"]
    assert (drive.running, b.status, b.num_preemptions) == ("a", RequestStatus.WAITING, 1)
    assert (b.slot, b.block_ids, b.num_computed_tokens) == (None, [], 0)
    while not a.finished:
        assert all(row.startswith("a") for row in drive.step()), "it waits until there is room for all of it"
    # b knew nine tokens when it gave way, in two full blocks: of these only the first is left.
    hits = drive.scheduler.counters.prefix_cache_hits
    assert drive.step() == ["b 4:9*"]
    assert drive.scheduler.counters.prefix_cache_hits - hits == BLOCK
    assert drive.scheduler.counters.num_resumed_with_hits == 1
    drive.drain()
    assert b.output_token_ids == [SAMPLED] * 8
    assert b.num_cached_tokens == 0, "that is of the prompt, when it first ran"


def test_the_last_in_rank_gives_way_first() -> None:
    drive = _squeezed("abc", policy="priority")
    assert drive.step() == ["a 8:9*", "b 8:9*"]
    assert drive.running == "ab"
    assert drive.scheduler.counters.num_preemptions == 1


def test_a_victim_in_flight_holds_its_blocks_until_its_step_has_run() -> None:
    drive = _squeezed(depth=2)
    a, b = drive.scheduler.running
    blocks, slot = list(b.block_ids), b.slot
    assert drive.submit() == [], "nobody can move until the step in flight has freed b's blocks"
    assert (b.status, b.block_ids, b.slot, drive.free) == (RequestStatus.LEAVING, blocks, slot, 0)
    assert slot not in drive.scheduler.free_slots
    known = b.num_tokens
    drive.land()
    assert b.status is RequestStatus.WAITING
    assert b.num_tokens == known + 1, "what its step sampled counts"
    assert drive.free == 2
    assert drive.submit() == ["a 8:9*"], "the host knows its token by now"
    assert drive.scheduler.counters.num_preemptions == 1, "one is enough"
    drive.drain()
    assert a.output_token_ids == b.output_token_ids == [SAMPLED] * 8


def test_no_one_else_gives_way_while_blocks_are_coming() -> None:
    drive = _squeezed("abc", depth=2)
    assert drive.submit() == [], "c's blocks will do for both of the others"
    assert (drive.running, drive.scheduler.counters.num_preemptions) == ("ab", 1)
    drive.land()
    assert drive.submit() == ["a 8:9*", "b 8:9*"]
    assert drive.scheduler.counters.num_preemptions == 1
    drive.drain()


def test_a_better_ranked_newcomer_takes_a_worse_ranked_ones_place() -> None:
    drive = Drive(policy="priority", seqs=2)
    drive.add("b", 5, 9, priority=1)
    c = drive.add("c", 5, 9, priority=2)
    drive.step()
    drive.add("a", 5, 9, priority=0)
    assert drive.step() == ["a 0:5*", "b 5:6*"]
    assert c.status is RequestStatus.WAITING
    drive.add("d", 5, 9, priority=3)
    assert drive.step() == ["a 5:6*", "b 6:7*"]
    drive.drain()


def test_a_better_ranked_newcomer_takes_a_worse_ranked_ones_blocks() -> None:
    drive = Drive(policy="priority", length=16, blocks=4)
    b = drive.add("b", 13, 3, priority=1)
    drive.step()
    assert drive.free == 0
    drive.add("a", 5, 2)
    assert drive.step() == ["a 0:5*"]
    assert (b.num_preemptions, drive.running) == (1, "a")
    drive.drain()


def test_under_fcfs_no_newcomer_takes_anything() -> None:
    drive = Drive(seqs=1)
    drive.add("a", 5, 9)
    drive.step()
    drive.add("b", 5, 9, priority=-5)
    assert drive.step() == ["a 5:6*"]
    assert drive.scheduler.counters.num_preemptions == 0


def test_no_one_is_overtaken_for_lack_of_blocks() -> None:
    drive = Drive(length=16, blocks=4)
    drive.add("a", 9, 2)
    drive.add("b", 9, 2)
    drive.add("c", 1, 1)
    assert drive.step() == ["a 0:9*"], "c would fit, but b goes first"
    assert drive.step() == ["a 9:10*"]
    assert drive.step() == ["b 0:9*", "c 0:1*"]


def test_a_newcomer_is_let_in_only_with_room_for_what_others_soon_need() -> None:
    drive = Drive(length=16, blocks=4)
    drive.add("a", 8, 8)
    drive.step()
    drive.add("b", 5, 2)
    assert drive.step() == ["a 8:9*"], "with b's two blocks there would be none for a's next tokens"
    assert drive.scheduler.counters.num_preemptions == 0


def test_giving_way_in_the_middle_of_a_chunked_prompt() -> None:
    drive = Drive(policy="priority", budget=6, length=16, blocks=4)
    b = drive.add("b", 14, 2, priority=1)
    assert [drive.step(), drive.step()] == [["b 0:6"], ["b 6:12"]]
    drive.add("a", 9, 2)
    assert drive.step() == ["a 0:6"]
    assert drive.step() == ["a 6:9*"]
    assert drive.step() == ["a 9:10*"]
    assert (b.num_preemptions, b.num_tokens) == (1, 14)
    # Of its three full blocks one was left.
    assert drive.step() == ["b 4:10"]
    drive.add("c", 9, 2)
    drive.drain()
    assert b.output_token_ids == [SAMPLED] * 2
    assert b.num_cached_tokens == 0


def test_giving_way_twice_in_a_row_and_while_resuming() -> None:
    drive = Drive(policy="priority", budget=4, length=16, blocks=5)
    b = drive.add("b", 13, 3, priority=1)
    for _ in range(2):
        drive.step()
    for round_ in (1, 2):
        newcomer = drive.add(f"a{round_}", tokens_of(str(round_), 13), 1)
        while not newcomer.finished:
            drive.step()
        assert b.num_preemptions == round_
        assert drive.step() == ["b 4:8"], "of its blocks one is left each time"
    drive.drain()
    assert b.num_admissions == 3
    assert b.output_token_ids == [SAMPLED] * 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_left", range(5))
def test_resuming_at_any_number_of_hits_samples_once(num_left: int, depth: int) -> None:
    """Whatever became of its blocks: the rest is computed in one go, and only its last row sampled."""
    drive = Drive(depth=depth, policy="priority", length=24, blocks=6, seqs=4)
    b = drive.add("b", 11, 9, priority=1)
    while b.num_tokens < 18:
        drive.step()
    newcomer = drive.add("a", min(23, BLOCK * (6 - num_left)), 1)
    while not newcomer.finished:
        drive.step()
    assert b.num_preemptions == 1
    known = b.num_tokens
    rows = drive.submit()
    start = BLOCK * min(num_left, known // BLOCK)
    assert rows == [f"b {start}:{known}*"]
    assert drive.scheduler.counters.num_resumed_with_hits == (start > 0)
    drive.drain()
    assert b.output_token_ids == [SAMPLED] * 9


def test_giving_way_with_the_last_token_under_way() -> None:
    drive = Drive(depth=2, policy="priority", seqs=1)
    b = drive.add("b", 5, 2, priority=1)
    drive.step()
    drive.submit()
    assert b.num_missing_tokens == 0
    drive.add("a", 5, 1)
    drive.land()
    assert drive.submit() == []
    assert b.status is RequestStatus.LEAVING
    drive.land()
    assert (b.status, b.output_token_ids) == (RequestStatus.FINISHED, [SAMPLED] * 2)
    assert drive.submit() == ["a 0:5*"]
    drive.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_many_under_pressure_all_finish(policy: str, caching: bool, depth: int) -> None:
    drive = Drive(policy=policy, caching=caching, depth=depth, length=32, blocks=9, budget=16, prefill=8)
    requests = [drive.add(chr(97 + i), 3 + i % 5, 20, priority=-i % 3) for i in range(12)]
    drive.drain(limit=12 * 40)
    assert all(request.output_token_ids == [SAMPLED] * 20 for request in requests)
    counters = drive.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_preemptions == sum(request.num_preemptions for request in requests)
    assert counters.prompt_tokens == sum(request.num_prompt_tokens for request in requests)
    assert (counters.num_resumed_with_hits > 0) is caching
    # The best-ranked always moves on, so it is never the one to give way.
    assert min(requests, key=lambda request: request.rank).num_preemptions == 0
