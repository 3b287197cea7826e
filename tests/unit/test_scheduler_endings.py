"""How requests leave: finished at any point, and begun anew after a failure."""

from __future__ import annotations

import pytest
from tests.unit.scheduler_drive import SAMPLED, Drive, tokens_of

from loadproof.engine.integrity import check_idle
from loadproof.engine.request import RequestStatus


@pytest.mark.parametrize("started", [False, True])
def test_finishing_frees_everything(started: bool) -> None:
    drive = Drive()
    request = drive.add("a", 5)
    if started:
        drive.step()
        assert drive.free < drive.scheduler.pool.num_blocks
    drive.finish(request)
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason == "abort"
    assert (request.slot, request.block_ids) == (None, [])
    check_idle(drive.scheduler)


@pytest.mark.skipif(not __debug__, reason="asserts are off")
def test_finishing_twice_is_asserted() -> None:
    drive = Drive()
    drive.finish(request := drive.add("a", 5))
    with pytest.raises(AssertionError, match="finished twice"):
        drive.scheduler.finish(request, "abort")


@pytest.mark.parametrize("num_steps", [1, 2])
def test_one_in_flight_holds_its_blocks_until_no_step_can_touch_them(num_steps: int) -> None:
    drive = Drive(depth=2)
    request = drive.add("a", 5, 9)
    for _ in range(num_steps):
        drive.submit()
    free = drive.free
    drive.finish(request)
    for _ in range(num_steps):
        assert drive.free == free
        assert request.slot is not None
        assert not drive.scheduler.has_unfinished()
        drive.land()
    assert request.slot is None
    assert request.output_token_ids == [], "what comes after its end doesn't count"
    check_idle(drive.scheduler)


def test_the_token_after_a_stop_is_discarded() -> None:
    drive = Drive(depth=2)
    a, b = drive.add("a", 5, 9), drive.add("b", 3, 9)
    drive.submit()
    assert drive.submit() == ["a 5:6~*", "b 3:4~*"]
    drive.land()
    drive.scheduler.finish(a, "stop", 7)
    assert drive.submit() == ["b 4:5~*"]
    drive.land()
    assert (a.output_token_ids, a.stop_reason) == ([SAMPLED], 7)
    assert b.output_token_ids == [SAMPLED] * 2
    drive.drain()


def test_what_a_finished_request_still_computes_is_offered() -> None:
    drive = Drive(depth=2)
    a = drive.add("a", 9, 9)
    drive.submit()
    drive.finish(a)
    drive.land()
    drive.add("a", 9)
    assert drive.submit() == ["a 8:9*"]


def test_its_blocks_go_to_nobody_else_while_in_flight() -> None:
    drive = Drive(depth=2, length=16, blocks=4)
    a = drive.add("a", 13, 2)
    drive.submit()
    drive.finish(a)
    b = drive.add("b", 5, 2)
    assert drive.submit() == []
    drive.land()
    assert drive.submit() == ["b 0:5*"]
    assert len(b.block_ids) == 2


def test_finishing_while_it_gives_way() -> None:
    drive = Drive(depth=2, policy="priority", seqs=1)
    b = drive.add("b", 5, 9, priority=1)
    drive.submit()
    a = drive.add("a", 5, 1)
    assert drive.submit() == []
    assert b.status is RequestStatus.LEAVING
    drive.finish(b)
    assert drive.scheduler.leaving == {b}
    drive.land()
    assert (b.status, b.output_token_ids, drive.scheduler.leaving) == (RequestStatus.FINISHED, [], set())
    assert len(drive.scheduler.waiting) == 1
    assert drive.submit() == ["a 0:5*"]
    drive.land()
    assert a.finished
    check_idle(drive.scheduler)


def test_finishing_after_it_gave_way() -> None:
    drive = Drive(policy="priority", seqs=1)
    b = drive.add("b", 5, 9, priority=1)
    drive.step()
    drive.add("a", 5, 2)
    drive.step()
    assert b.status is RequestStatus.WAITING
    drive.finish(b)
    assert len(drive.scheduler.waiting) == 0
    drive.drain()
    assert b.num_tokens == 6


def test_finishing_while_it_waits_for_a_block() -> None:
    drive = Drive(depth=2)
    drive.add("a", 9)
    b, c = drive.add("b", tokens_of("a", 9)), drive.add("c", tokens_of("a", 9))
    drive.submit()
    assert drive.scheduler.waiting.num_parked == 2
    drive.finish(b)
    assert drive.scheduler.waiting.num_parked == 1
    drive.land()
    assert drive.submit() == ["a 9:10*", "c 8:9*"]
    drive.drain()
    assert (b.num_admissions, c.num_cached_tokens) == (0, 8)


def test_all_that_wait_may_be_finished() -> None:
    drive = Drive(seqs=1)
    requests = [drive.add(chr(97 + i), 2) for i in range(20)]
    drive.step()
    for request in requests:
        drive.finish(request)
    assert not drive.scheduler.has_unfinished()
    check_idle(drive.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_restart_keeps_the_tokens_and_nothing_else(depth: int) -> None:
    drive = Drive(depth=depth, policy="priority", length=32, blocks=8)
    for index, name in enumerate("abcdef"):
        drive.add(name, tokens_of("pq"[index % 2], 9), 12, priority=index % 2)
    for _ in range(4):
        drive.submit()
    alive = [request for chunks in drive.flights for request in {chunk.request for chunk in chunks}]
    requests = {request for request in alive if not request.finished}
    requests |= {*drive.scheduler.waiting.requests(), *drive.scheduler.running, *drive.scheduler.leaving}
    known = {request: list(request.output_token_ids) for request in requests}
    evictions = drive.scheduler.pool.num_evictions
    drive.flights.clear()
    drive.scheduler.restart(requests)
    drive.check()
    scheduler = drive.scheduler
    assert (scheduler.running, scheduler.leaving, scheduler.promises) == ([], set(), {})
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks
    assert scheduler.pool.num_cached_blocks == 0, "what failed may have written anything"
    assert scheduler.pool.num_evictions == evictions, "counters go on"
    assert {request: request.output_token_ids for request in requests} == known
    drive.drain()
    assert all(request.output_token_ids == [SAMPLED] * 12 for request in requests)


def test_a_restart_without_requests_leaves_nothing() -> None:
    drive = Drive(depth=2)
    drive.add("a", 9)
    drive.submit()
    drive.flights.clear()
    drive.scheduler.restart(())
    check_idle(drive.scheduler)
    assert drive.submit() == []


def test_ranks_stay_as_they_were_after_a_restart() -> None:
    drive = Drive(budget=1)
    a, b = drive.add("a", 1, 3), drive.add("b", 1, 3)
    drive.step()
    drive.scheduler.restart([b, a])
    assert drive.step() == ["a 0:1"]
