"""Who computes what in the next step, under one budget of tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from loadproof.devices.device import DeviceLimits
from loadproof.engine.block_pool import BlockPool
from loadproof.engine.request import FinishReason, Request, RequestStatus


class Chunk(NamedTuple):
    """``num_tokens`` tokens of a request, from ``num_computed_tokens`` on; at least one.

    ``samples`` says that they reach its last known token, so that the next one can be sampled.
    """

    request: Request
    num_tokens: int
    samples: bool


class Scheduler:
    """First come, first served, with one token budget a step for prompts and decodes alike.

    Each step, ``num_computed_tokens`` of every running request catches up with ``num_tokens`` as far as the
    budget goes, so long prompts are split into chunks. A request is admitted once a slot and the blocks for
    its whole length are free; it keeps both until it finishes, so nothing ever has to be preempted.
    """

    def __init__(self, limits: DeviceLimits) -> None:
        assert limits.num_blocks * limits.block_size >= limits.max_model_len, "a longest request must fit"
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.waiting: OrderedDict[tuple[str, int], Request] = OrderedDict()
        self.running: dict[tuple[str, int], Request] = {}
        self.num_sat_out_steps = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request; its length has been checked against ``max_model_len``."""
        assert request.max_cached_tokens < self.limits.max_model_len
        assert request.status is RequestStatus.WAITING
        assert request.key not in self.waiting
        self.waiting[request.key] = request

    def schedule(self) -> list[Chunk]:
        """Plan a step: running requests first, in the order they came, then waiting ones as they fit.

        Only admission changes state; computed tokens move in :meth:`advance`, after the step has run, so a
        step that never ran can be planned again.
        """
        budget = self.limits.max_num_batched_tokens
        chunks: list[Chunk] = []
        for request in self.running.values():
            if budget == 0:
                self.num_sat_out_steps += 1
                continue
            budget -= self._take(request, budget, chunks)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget -= self._take(admitted, budget, chunks)
        return chunks

    def advance(self, chunk: Chunk, token_id: int | None) -> None:
        """Record that a chunk ran and, where it sampled, its token."""
        request = chunk.request
        if token_id is not None:
            request.output_token_ids.append(token_id)
        request.num_computed_tokens += chunk.num_tokens
        assert request.num_computed_tokens < request.num_tokens

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a waiting or running request and free what it holds."""
        assert not request.finished, f"request {request.key} finished twice"
        if request.status is RequestStatus.WAITING:
            del self.waiting[request.key]
        else:
            del self.running[request.key]
            self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def has_unfinished(self) -> bool:
        """Whether another step has work."""
        return bool(self.running or self.waiting)

    def check_idle(self) -> None:
        """Assert that an engine without requests holds no slot and no block."""
        assert not self.has_unfinished()
        assert self.pool.num_free_blocks == self.limits.num_blocks
        assert len(self._free_slots) == self.limits.max_num_seqs

    def _take(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        missing = request.num_tokens - request.num_computed_tokens
        assert missing > 0
        count = min(missing, budget)
        chunks.append(Chunk(request, count, count == missing))
        return count

    def _admit(self) -> Request | None:
        """Move the oldest waiting request to running if a slot and its blocks are free."""
        if not self.waiting or not self._free_slots:
            return None
        request = next(iter(self.waiting.values()))
        num_blocks = -(-request.max_cached_tokens // self.limits.block_size)
        if num_blocks > self.pool.num_free_blocks:
            return None
        del self.waiting[request.key]
        request.block_ids = self.pool.allocate(num_blocks)
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.running[request.key] = request
        return request

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self.pool.free(request.block_ids)
        self._free_slots.append(request.slot)
        request.block_ids = []
        request.slot = None
