"""The waiting queue, against a sorted list with some of it set aside."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadproof import SamplingParams
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.waiting import WaitingQueue


def ranked(priority: int, arrival: int = 0) -> Request:
    request = Request(f"{priority}-{arrival}", 0, [1], SamplingParams(), 0, 1, frozenset())
    request.rank = (priority, arrival)
    return request


def queue_of(*priorities: int) -> tuple[WaitingQueue, list[Request]]:
    queue = WaitingQueue()
    requests = [ranked(priority) for priority in priorities]
    for request in requests:
        queue.add(request)
    return queue, requests


def drop(queue: WaitingQueue, request: Request) -> None:
    request.status = RequestStatus.FINISHED
    queue.drop(request)


def taken(queue: WaitingQueue) -> list[Request]:
    """All that are not parked, in the order in which they come up."""
    order = []
    while queue.first() is not None:
        order.append(queue.pop())
    return order


def test_the_best_rank_comes_first() -> None:
    queue, requests = queue_of(3, -1, 2, 0)
    assert len(queue) == 4
    assert taken(queue) == [requests[1], requests[3], requests[2], requests[0]]
    assert len(queue) == 0
    assert queue.first() is None


def test_arrival_decides_among_equals() -> None:
    queue = WaitingQueue()
    late, early = ranked(1, 5), ranked(1, 2)
    queue.add(late)
    queue.add(early)
    assert taken(queue) == [early, late]


def test_parked_ones_are_passed_over_until_their_block_is_there() -> None:
    queue, (first, second, third) = queue_of(1, 2, 3)
    assert queue.first() is first
    queue.park(b"x")
    assert queue.first() is second
    queue.park(b"y")
    assert (queue.first(), queue.num_parked, len(queue)) == (third, 2, 3)
    assert queue.awaited() == {b"x", b"y"}
    queue.unpark(b"z")
    assert queue.first() is third
    queue.unpark(b"y")
    assert (queue.first(), queue.awaited()) == (second, {b"x"})
    queue.unpark(b"x")
    assert queue.num_parked == 0
    assert taken(queue) == [first, second, third]


def test_many_may_wait_for_one_block() -> None:
    queue, requests = queue_of(1, 2, 3)
    for _ in range(2):
        assert queue.first() is not None
        queue.park(b"x")
    queue.unpark(b"x")
    assert taken(queue) == requests


def test_a_dropped_one_never_comes_up() -> None:
    queue, (first, second, third) = queue_of(1, 2, 3)
    drop(queue, second)
    assert len(queue) == 2
    assert set(queue.requests()) == {first, third}
    assert taken(queue) == [first, third]


def test_a_parked_one_may_be_dropped() -> None:
    queue, (first, second, third) = queue_of(1, 2, 3)
    for _ in range(2):
        assert queue.first() is not None
        queue.park(b"x")
    drop(queue, first)
    assert (len(queue), queue.num_parked, queue.awaited()) == (2, 1, {b"x"})
    drop(queue, second)
    assert (len(queue), queue.num_parked, queue.awaited()) == (1, 0, set())
    queue.unpark(b"x")
    assert taken(queue) == [third]


@pytest.mark.parametrize("count", [64, 65, 66, 129, 130, 300])
def test_dropped_entries_never_outnumber_the_others_for_long(count: int) -> None:
    queue, requests = queue_of(*range(count))
    for request in requests[1:-1]:
        drop(queue, request)
        assert len(queue._heap) <= 2 * (len(queue) + 65)
    assert len(queue) == 2
    assert taken(queue) == [requests[0], requests[-1]]


def test_one_that_comes_back_comes_up_in_its_rank() -> None:
    queue, (first, second) = queue_of(1, 2)
    assert queue.first() is first
    queue.pop().status = RequestStatus.RUNNING
    first.status = RequestStatus.WAITING
    queue.add(first)
    assert taken(queue) == [first, second]


class QueueMachine(RuleBasedStateMachine):
    """Requests come, run, park and are dropped in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.ready: list[Request] = []
        self.parked: dict[bytes, list[Request]] = {}
        self.gone: list[Request] = []
        self.num_arrivals = 0

    @rule(priority=st.integers(-3, 3), count=st.sampled_from([1, 1, 1, 40]))
    def add(self, priority: int, count: int) -> None:
        for _ in range(count):
            request = ranked(priority, self.num_arrivals)
            self.num_arrivals += 1
            self.queue.add(request)
            self.ready.append(request)

    @precondition(lambda self: self.ready)
    @rule()
    def run(self) -> None:
        request = self.first()
        assert self.queue.pop() is request
        request.status = RequestStatus.RUNNING
        self.ready.remove(request)
        self.gone.append(request)

    @precondition(lambda self: self.gone)
    @rule()
    def come_back(self) -> None:
        request = self.gone.pop()
        request.status = RequestStatus.WAITING
        self.queue.add(request)
        self.ready.append(request)

    @precondition(lambda self: self.ready)
    @rule(digest=st.sampled_from([b"x", b"y", b"z"]))
    def park(self, digest: bytes) -> None:
        request = self.first()
        self.queue.park(digest)
        self.ready.remove(request)
        self.parked.setdefault(digest, []).append(request)

    @rule(digest=st.sampled_from([b"x", b"y", b"z"]))
    def unpark(self, digest: bytes) -> None:
        self.queue.unpark(digest)
        self.ready += self.parked.pop(digest, [])

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), count=st.sampled_from([1, 1, 35]))
    def drop_ready(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.ready))):
            drop(self.queue, self.ready.pop(data.draw(st.integers(0, len(self.ready) - 1))))

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def drop_parked(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.parked)))
        drop(self.queue, self.parked[digest].pop())
        if not self.parked[digest]:
            del self.parked[digest]

    def first(self) -> Request:
        first = self.queue.first()
        assert first is not None
        assert first is min(self.ready, key=lambda request: request.rank)
        return first

    @invariant()
    def agrees(self) -> None:
        parked = [request for requests in self.parked.values() for request in requests]
        assert len(self.queue) == len(self.ready) + len(parked)
        assert self.queue.num_parked == len(parked)
        assert self.queue.awaited() == set(self.parked)
        assert {request.rank for request in self.queue.requests()} == {
            request.rank for request in self.ready + parked
        }
        assert self.ready or self.queue.first() is None


TestQueueAgainstSortedList = QueueMachine.TestCase
TestQueueAgainstSortedList.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
