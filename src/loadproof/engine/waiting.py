"""The queue of requests that wait to run, best rank first."""

from __future__ import annotations

import heapq

from loadproof.engine.request import Rank, Request, RequestStatus


class WaitingQueue:
    """Waiting requests by rank; some of them parked until a block's contents exist.

    Adding, taking the first and dropping any cost logarithmic time at most, however many there are: a
    dropped request's entry stays until it comes up, or until such entries outnumber the others, or are all.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._parked: dict[bytes, dict[Rank, Request]] = {}  # by the digest that they wait for
        self._parked_for: dict[Rank, bytes] = {}
        self._num_dropped = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dropped + len(self._parked_for)

    @property
    def num_parked(self) -> int:
        """How many of them are parked."""
        return len(self._parked_for)

    def parks_before(self, rank: Rank) -> bool:
        """Whether one that ranks before is parked."""
        return any(parked < rank for parked in self._parked_for)

    def add(self, request: Request) -> None:
        """Queue a request; ranks are distinct."""
        assert request.status is RequestStatus.WAITING
        heapq.heappush(self._heap, (request.rank, request))

    def first(self) -> Request | None:
        """The best-ranked request that isn't parked."""
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
            self._num_dropped -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take the first out, which :meth:`first` has just shown."""
        request = heapq.heappop(self._heap)[1]
        assert request.status is RequestStatus.WAITING
        return request

    def park(self, digest: bytes) -> None:
        """Set the first aside until :meth:`unpark` of that digest."""
        request = self.pop()
        self._parked.setdefault(digest, {})[request.rank] = request
        self._parked_for[request.rank] = digest

    def unpark(self, digest: bytes) -> None:
        """Queue again whoever waits for a digest."""
        for rank, request in self._parked.pop(digest, {}).items():
            del self._parked_for[rank]
            heapq.heappush(self._heap, (rank, request))

    def drop(self, request: Request) -> None:
        """Take a request out that has just ceased to be a waiting one."""
        assert request.status is not RequestStatus.WAITING
        digest = self._parked_for.pop(request.rank, None)
        if digest is None:
            self._num_dropped += 1
            self._compact()
            return
        del self._parked[digest][request.rank]
        if not self._parked[digest]:
            del self._parked[digest]

    def requests(self) -> list[Request]:
        """All of them, in no order."""
        queued = [request for _, request in self._heap if request.status is RequestStatus.WAITING]
        return queued + [request for parked in self._parked.values() for request in parked.values()]

    def awaited(self) -> set[bytes]:
        """Digests that some are parked for."""
        return set(self._parked)

    def _compact(self) -> None:
        dropped, entries = self._num_dropped, len(self._heap)
        if dropped == entries or (dropped > 64 and dropped > entries // 2):
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_dropped = 0
