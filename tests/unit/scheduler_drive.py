"""Drives a scheduler by itself: steps come back when the test says so; the books are checked after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loadproof import SamplingParams
from loadproof.devices.device import DeviceLimits
from loadproof.engine.integrity import check_idle, check_integrity
from loadproof.engine.request import Request
from loadproof.engine.scheduler import Scheduler, SchedulerOptions
from loadproof.engine.step_plan import Chunk

BLOCK = 4
SAMPLED = 7
"""The token that every step samples."""


def tokens_of(name: str, count: int) -> list[int]:
    """A prompt that shares no block with those of other letters."""
    return [ord(name)] * count


def shown(chunk: Chunk) -> str:
    """``a 8:12`` for rows 8 to 11 of request a; ``*`` where they sample, ``~`` where the last is carried."""
    marks = "~" * chunk.carried + "*" * chunk.samples
    return f"{chunk.request.request_id} {chunk.start}:{chunk.stop}{marks}"


class Drive:
    """Blocks of four tokens; at most ``depth`` steps on their way."""

    def __init__(
        self,
        *,
        depth: int = 1,
        policy: str = "fcfs",
        caching: bool = True,
        prefill: int = 512,
        budget: int = 64,
        seqs: int = 8,
        length: int = 64,
        blocks: int = 32,
    ) -> None:
        limits = DeviceLimits(budget, seqs, length, BLOCK, blocks)
        self.scheduler = Scheduler(limits, SchedulerOptions(policy, caching, prefill))
        self.depth = depth
        self.flights: deque[list[Chunk]] = deque()
        self.num_rows = 0

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str | None = None,
    ) -> Request:
        """Queue a request; a prompt given by its length shares nothing with those of other names."""
        ids = tokens_of(name, prompt) if isinstance(prompt, int) else list(prompt)
        request = Request(name, 0, ids, SamplingParams(), 0, max_tokens, frozenset(), priority, salt)
        self.scheduler.add(request)
        self.check()
        return request

    def submit(self) -> list[str]:
        """Plan a step and have it under way, as soon as there is place for it."""
        if len(self.flights) == self.depth:
            self.land()
        chunks = self.scheduler.schedule()
        self.num_rows += sum(chunk.num_tokens for chunk in chunks)
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.limits.max_num_batched_tokens
        if chunks:
            self.flights.append(chunks)
        self.check()
        return [shown(chunk) for chunk in chunks]

    def land(self) -> None:
        """Bring the oldest step's results, and finish whom they end."""
        chunks = self.flights.popleft()
        landed = [
            chunk.request
            for chunk in chunks
            if self.scheduler.retire(chunk, SAMPLED if chunk.samples else None)
        ]
        for request in landed:
            if not request.finished and request.token_finish() is not None:
                self.scheduler.finish(request, "length")
        self.check()

    def step(self) -> list[str]:
        """Plan a step, and bring the oldest one's results where as many as may be are under way."""
        rows = self.submit()
        if self.flights and (not rows or len(self.flights) == self.depth):
            self.land()
        return rows

    def finish(self, request: Request) -> None:
        """Abort a request."""
        self.scheduler.finish(request, "abort")
        self.check()

    def drain(self, limit: int = 1000) -> int:
        """Run all to their end; how many steps that took. The books must be empty then."""
        count = 0
        while self.scheduler.has_unfinished():
            assert count < limit, f"requests are left after {limit} steps"
            self.step()
            count += 1
        while self.flights:
            self.land()
        check_idle(self.scheduler)
        return count

    def check(self) -> None:
        """All bookkeeping, as after every step."""
        check_integrity(self.scheduler, self.depth)

    @property
    def running(self) -> str:
        """Names of the running requests by rank."""
        return "".join(request.request_id for request in self.scheduler.running)

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.scheduler.pool.num_free_blocks
