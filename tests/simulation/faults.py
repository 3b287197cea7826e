"""Faults to put into the real code, as :class:`pytest.MonkeyPatch` can: the simulator must find each.

Most are what engines in use have had; the first lines of each say what goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadproof.devices.device import I32, ScoreResult, StepBatch
from loadproof.engine import scheduler as scheduling
from loadproof.engine.block_pool import BlockKey, BlockPool
from loadproof.engine.prefix_keys import root_digest
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.runner import Runner
from loadproof.engine.sampling import SamplingTable
from loadproof.engine.scheduler import Scheduler
from loadproof.engine.step_plan import Chunk, StepPlan
from loadproof.engine.waiting import WaitingQueue

Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Fault] = {}


def fault(put: Fault) -> Fault:
    """Name a fault for the tests."""
    FAULTS[put.__name__] = put
    return put


@fault
def block_offered_before_its_step_has_run(patch: pytest.MonkeyPatch) -> None:
    move_on = Scheduler._move_on

    def hasty(self: Scheduler, request: Request, plan: StepPlan) -> None:
        move_on(self, request, plan)
        if request.prefix is not None:
            request.prefix.extend(request)
            num_full = min(request.num_computed_tokens, request.num_tokens) // self.limits.block_size
            for index in range(request.num_published_blocks, num_full):
                self.pool.publish(request.block_ids[index], request.prefix.keys[index])

    patch.setattr(Scheduler, "_move_on", hasty)


def _free_at_once(patch: pytest.MonkeyPatch, wanted: RequestStatus) -> None:
    stop_running = Scheduler._stop_running

    def hasty(self: Scheduler, request: Request, status: RequestStatus) -> None:
        stop_running(self, request, status)
        if status is wanted:
            self.pool.release(request.block_ids)
            request.block_ids = []

    patch.setattr(Scheduler, "_stop_running", hasty)


@fault
def blocks_of_the_preempted_freed_with_a_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    _free_at_once(patch, RequestStatus.LEAVING)


@fault
def blocks_of_the_finished_freed_with_a_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    _free_at_once(patch, RequestStatus.FINISHED)


@fault
def pending_token_counted_off_twice(patch: pytest.MonkeyPatch) -> None:
    retire = Scheduler.retire

    def wrong(self: Scheduler, chunk: Chunk, token_id: int | None, scores: ScoreResult | None = None) -> bool:
        counts = retire(self, chunk, token_id, scores)
        chunk.request.num_pending_tokens = 0
        return counts

    patch.setattr(Scheduler, "retire", wrong)


@fault
def token_in_flight_lost_on_preemption(patch: pytest.MonkeyPatch) -> None:
    retire = Scheduler.retire

    def wrong(self: Scheduler, chunk: Chunk, token_id: int | None, scores: ScoreResult | None = None) -> bool:
        leaving = chunk.request.status is RequestStatus.LEAVING
        counts = retire(self, chunk, token_id, scores)
        if leaving and counts:
            chunk.request.output_token_ids.pop()
            return False
        return counts

    patch.setattr(Scheduler, "retire", wrong)


@fault
def row_that_sat_out_carried(patch: pytest.MonkeyPatch) -> None:
    prepare = Runner.prepare

    def wrong(self: Runner, chunks: list[Chunk], return_logits: bool = False) -> StepBatch:
        chunks = [chunk._replace(carried=chunk.samples and chunk.num_tokens == 1) for chunk in chunks]
        return prepare(self, chunks, return_logits)

    patch.setattr(Runner, "prepare", wrong)


@fault
def row_that_sat_out_not_seeded_from_the_host(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Runner, chunks: list[Chunk], token_ids: I32) -> None:
        """Record nothing."""

    patch.setattr(Runner, "record", wrong)


@fault
def logits_counted_from_the_prompt_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    prepare = Runner.prepare

    def wrong(self: Runner, chunks: list[Chunk], return_logits: bool = False) -> StepBatch:
        batch = prepare(self, chunks, return_logits)
        starts = batch.query_starts.tolist()
        rows: list[int] = []
        for index, chunk in enumerate(chunk for chunk in chunks if chunk.num_tokens):
            if chunk.samples:
                resumed = max(chunk.start, chunk.request.num_prompt_tokens - 1)
                rows += range(starts[index] + resumed - chunk.start, starts[index + 1])
        return replace(batch, logits_rows=np.array(rows, np.int32))

    patch.setattr(Runner, "prepare", wrong)


@fault
def published_blocks_not_forgotten_on_preemption(patch: pytest.MonkeyPatch) -> None:
    let_go = Request.let_go

    def wrong(self: Request) -> None:
        num_published = self.num_published_blocks
        let_go(self)
        self.num_published_blocks = num_published

    patch.setattr(Request, "let_go", wrong)
    start = Scheduler._start

    def keep(self: Scheduler, request: Request, hits: list[int]) -> None:
        num_published = request.num_published_blocks
        start(self, request, hits)
        request.num_published_blocks = max(num_published, len(hits))

    patch.setattr(Scheduler, "_start", keep)


@fault
def hits_that_cover_the_last_token(patch: pytest.MonkeyPatch) -> None:
    find_prefix = Scheduler._find_prefix

    def wrong(self: Scheduler, request: Request) -> list[int] | None:
        hits = find_prefix(self, request)
        if hits is None or request.prefix is None:
            return hits
        return self.pool.find(request.prefix.keys[: request.num_tokens // self.limits.block_size])

    patch.setattr(Scheduler, "_find_prefix", wrong)


@fault
def hit_left_unused(patch: pytest.MonkeyPatch) -> None:
    find = BlockPool.find

    def wrong(self: BlockPool, keys: Sequence[BlockKey]) -> list[int]:
        return find(self, keys)[:2]

    patch.setattr(BlockPool, "find", wrong)


@fault
def evicted_block_still_offered(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: BlockPool, block: int) -> None:
        self._keys[block] = None

    patch.setattr(BlockPool, "_unpublish", wrong)


@fault
def resumed_at_the_wrong_position(patch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def wrong(self: Scheduler, request: Request, hits: list[int]) -> None:
        start(self, request, hits)
        if request.num_preemptions and hits:
            request.num_computed_tokens -= 1
            request.num_ready_tokens -= 1

    patch.setattr(Scheduler, "_start", wrong)


@fault
def block_freed_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def wrong(self: BlockPool, blocks: Sequence[int]) -> None:
        release(self, blocks)
        if self.num_holders(blocks[0]):
            release(self, blocks[:1])

    patch.setattr(BlockPool, "release", wrong)


@fault
def block_never_freed(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def wrong(self: BlockPool, blocks: Sequence[int]) -> None:
        release(self, blocks[:-1] if len(blocks) > 3 else blocks)

    patch.setattr(BlockPool, "release", wrong)


@fault
def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def wrong(self: Scheduler, request: Request) -> None:
        arrivals = self._num_arrivals
        self._num_arrivals = -arrivals
        add(self, request)
        self._num_arrivals = arrivals + 1

    patch.setattr(Scheduler, "add", wrong)


@fault
def nobody_gives_way(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Scheduler, request: Request, num_blocks: int, plan: StepPlan) -> bool:
        return False

    patch.setattr(Scheduler, "_make_way", wrong)


@fault
def parked_request_never_woken(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: WaitingQueue, digest: bytes) -> None:
        """Wake nobody."""

    patch.setattr(WaitingQueue, "unpark", wrong)


@fault
def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    def wrong(cache_salt: str | None, generation: int) -> bytes:
        return root_digest(None, generation)

    patch.setattr(scheduling, "root_digest", wrong)


@fault
def cache_reset_that_running_requests_survive(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Scheduler) -> None:
        self.pool.forget()

    patch.setattr(Scheduler, "reset_prefix_cache", wrong)


@fault
def sampling_parameters_of_the_slots_last_owner(patch: pytest.MonkeyPatch) -> None:
    load = SamplingTable.load

    def wrong(self: SamplingTable, slot: int, request: Request, vocab_size: int) -> None:
        if not self._seeds[slot]:
            load(self, slot, request, vocab_size)

    patch.setattr(SamplingTable, "load", wrong)


@fault
def block_table_of_the_slots_last_owner(patch: pytest.MonkeyPatch) -> None:
    load = Runner._load

    def wrong(self: Runner, slot: int, request: Request) -> None:
        num_blocks, blocks = self._num_blocks[slot], self._blocks[slot].copy()
        load(self, slot, request)
        self._num_blocks[slot], self._blocks[slot] = num_blocks, blocks

    patch.setattr(Runner, "_load", wrong)


@fault
def prompts_that_stall_those_who_decode(patch: pytest.MonkeyPatch) -> None:
    new_plan = Scheduler._new_plan

    def wrong(self: Scheduler) -> StepPlan:
        plan = new_plan(self)
        plan.num_prefill_left = plan.num_tokens_left
        return plan

    patch.setattr(Scheduler, "_new_plan", wrong)


@fault
def request_lost_on_a_restart(patch: pytest.MonkeyPatch) -> None:
    restart = Scheduler.restart

    def wrong(self: Scheduler, requests: Sequence[Request]) -> None:
        restart(self, requests[:-1])

    patch.setattr(Scheduler, "restart", wrong)
