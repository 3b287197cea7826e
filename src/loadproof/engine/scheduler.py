"""Who computes what in the next step, under one budget of tokens, and who gives way when blocks run out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from loadproof.devices.device import DeviceLimits, ScoreResult
from loadproof.engine.block_pool import BlockKey, BlockPool
from loadproof.engine.kept_scores import copy_scores, keep_scores
from loadproof.engine.prefix_keys import PrefixKeys, root_digest
from loadproof.engine.prompt_scores import PromptScores
from loadproof.engine.request import FinishReason, Rank, Request, RequestStatus
from loadproof.engine.step_plan import Chunk, StepPlan
from loadproof.engine.waiting import WaitingQueue


@dataclass(frozen=True)
class SchedulerOptions:
    """How to schedule; none of it changes an answer."""

    policy: str = "fcfs"
    """"fcfs", or "priority": the least first, and by arrival among equals."""
    enable_prefix_caching: bool = True
    max_num_prefill_tokens: int = 1024
    """Most rows of prompts in a step while other requests decode."""


@dataclass
class SchedulerCounters:
    """What happened so far."""

    prompt_tokens: int = 0  # of requests that have started
    num_preemptions: int = 0
    num_resumed_with_hits: int = 0
    num_sat_out_steps: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens


_RANK: Callable[[Request], Rank] = attrgetter("rank")


class Scheduler:
    """Requests in order of their rank, each moved on as far as one token budget and the blocks go.

    In each step ``num_computed_tokens`` of every running request catches up with its tokens, prompt and
    output alike, long ones in chunks. Blocks are taken as they are needed. When they run out, the
    worst-ranked running request gives way: its full blocks stay cached, and it resumes with what it finds
    of them. The best-ranked one never does, so it always moves on, and thus every request in its turn.

    A step is in three acts: :meth:`schedule` counts it as computed; the caller submits it, and hands each
    chunk to :meth:`retire` with its result, in the order of scheduling. Until then no block that the step
    touches is handed to anybody else. If anything fails between, :meth:`restart` begins anew.
    """

    def __init__(self, limits: DeviceLimits, options: SchedulerOptions | None = None) -> None:
        assert limits.num_blocks * limits.block_size >= limits.max_model_len, "a longest request must fit"
        self.limits = limits
        self.options = options or SchedulerOptions()
        self.counters = SchedulerCounters()
        self.pool = BlockPool(limits.num_blocks)
        self.newly_started: list[Request] = []  # by the latest plan, those that had never run
        self._num_arrivals = 0
        self._cache_generation = 0
        self.restart(())

    def restart(self, requests: Iterable[Request]) -> None:
        """Hold nothing but these unfinished requests: they wait with the tokens they have.

        Reads nothing of what it replaces, so it can be done again where it was interrupted.
        """
        waiting = WaitingQueue()
        for request in requests:
            assert not request.finished
            request.let_go()
            request.num_steps_in_flight = request.num_pending_tokens = 0
            if request.prompt_scores is not None:
                request.prompt_scores.forget_submitted()
            request.status = RequestStatus.WAITING
            waiting.add(request)
        self.pool.clear()
        self.waiting = waiting
        self.running: list[Request] = []  # by rank
        self.leaving: set[Request] = set()  # hold a slot and blocks until their last step is retired
        self.promises: dict[bytes, Request] = {}  # digests of blocks that a running request will fill
        self.free_slots = list(range(self.limits.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request; its length has been checked against ``max_model_len``."""
        assert request.max_cached_tokens < self.limits.max_model_len
        assert request.status is RequestStatus.WAITING
        priority = request.priority if self.options.policy == "priority" else 0
        request.rank = (priority, self._num_arrivals)
        self._num_arrivals += 1
        self.waiting.add(request)

    def has_unfinished(self) -> bool:
        """Whether a request is still to be finished."""
        return bool(self.running or len(self.waiting)) or any(
            request.status is RequestStatus.LEAVING for request in self.leaving
        )

    def schedule(self) -> list[Chunk]:
        """Plan a step and count it as computed; where there is nothing to compute, it has no chunks."""
        plan = self._new_plan()
        self.newly_started = []
        index = 0
        while plan.num_tokens_left > 0:
            running = self.running[index] if index < len(self.running) else None
            waiting = self.waiting.first() if plan.admits else None
            if waiting is not None and (running is None or waiting.rank < running.rank):
                if self._admit(waiting, plan):  # somewhere before running[index], which is the next one yet
                    index += 1
                    self._move_on(waiting, plan)
            elif running is not None:
                index += 1
                self._move_on(running, plan)
            else:
                break
        overlooked = sum(request.num_missing_tokens > 0 for request in self.running[index:])
        self.counters.num_sat_out_steps += overlooked
        return plan.chunks

    def retire(self, chunk: Chunk, token_id: int | None, scores: ScoreResult | None = None) -> bool:
        """Take in that a chunk has run and, where it sampled or scored, its token and log-probabilities.

        Returns whether the request has one more token now: one that finished meanwhile takes none.
        """
        request = chunk.request
        assert (token_id is not None) == chunk.samples
        assert request.num_steps_in_flight > 0
        request.num_steps_in_flight -= 1
        counts = token_id is not None and request.status is not RequestStatus.FINISHED
        if token_id is not None:
            request.num_pending_tokens -= 1
            if counts:
                request.output_token_ids.append(token_id)
        assert request.num_ready_tokens == chunk.start or request.finished
        request.num_ready_tokens = ready = min(chunk.stop, request.num_tokens)
        if ready // self.limits.block_size != request.num_published_blocks:
            self._publish(request)
        if scores is not None and request.prompt_scores is not None and chunk.scored is not None:
            request.prompt_scores.record(chunk.scored, scores)
            keep_scores(self.pool, request, request.prompt_scores, chunk.scored, self.limits.block_size)
        if request.status is not RequestStatus.RUNNING:
            self._leave_if_landed(request)
        return counts

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request, wherever it stands; what it holds is free once no submitted step can touch it."""
        assert not request.finished, f"request {request.key} finished twice"
        before = request.status
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if before is RequestStatus.RUNNING:
            self._stop_running(request, RequestStatus.FINISHED)
            self._leave_if_landed(request)
            return
        request.status = RequestStatus.FINISHED
        if before is RequestStatus.WAITING:
            self.waiting.drop(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; what running requests have computed is offered to nobody later."""
        self.pool.forget()
        self._cache_generation += 1

    def _new_plan(self) -> StepPlan:
        budget = self.limits.max_num_batched_tokens
        num_decodes = [request.num_missing_tokens for request in self.running].count(1)
        prefill = budget
        if num_decodes:
            # Prompts leave room for all who decode, but never less than a quarter is theirs.
            prefill = min(self.options.max_num_prefill_tokens, max(budget - num_decodes, budget // 4, 1))
        return StepPlan(budget, prefill, budget)

    def _move_on(self, request: Request, plan: StepPlan) -> None:
        """Plan as many rows of a running request as budget and blocks allow."""
        missing = request.num_missing_tokens
        if missing == 0:
            return
        count = min(missing, plan.num_tokens_left)
        if missing > 1:
            count = min(count, plan.num_prefill_left)
        start = request.num_computed_tokens
        if start + count > len(request.block_ids) * self.limits.block_size:
            count = self._grow(request, count, plan)
        scored = None
        if request.prompt_scores is not None:
            scored = plan.score(request, request.prompt_scores, count, self.limits.max_num_batched_tokens)
            count = self._num_rows_scored(request, request.prompt_scores, count)
        if count == 0 and scored is None:
            self.counters.num_sat_out_steps += 1
            return
        plan.num_tokens_left -= count
        if missing > 1:
            plan.num_prefill_left -= count
        samples = count == missing
        carried = start + count > request.num_tokens
        assert not carried or count == request.num_pending_tokens == 1
        plan.chunks.append(Chunk(request, start, count, samples, carried, scored))
        request.num_computed_tokens += count
        request.num_pending_tokens += samples
        request.num_steps_in_flight += 1

    def _num_rows_scored(self, request: Request, scores: PromptScores, count: int) -> int:
        """How many of ``count`` rows don't outrun the scores: a prompt is scored when its end is computed."""
        start = request.num_computed_tokens
        left = scores.missing(min(start + count, len(scores.targets)))
        return max(0, int(left[0]) - start) if len(left) else count

    def _grow(self, request: Request, count: int, plan: StepPlan) -> int:
        """Give a running request blocks for ``count`` more positions; how many it has blocks for now."""
        wanted = self._num_blocks(request.num_computed_tokens + count) - len(request.block_ids)
        while wanted > self.pool.num_free_blocks - plan.num_kept:
            if not self._make_way(request, wanted + plan.num_kept, plan):
                break
        if wanted > 0:
            taken = min(wanted, max(0, self.pool.num_free_blocks - plan.num_kept))
            request.block_ids += self.pool.allocate(taken)
            if plan.num_wanted is not None:
                plan.num_wanted -= taken
        held = len(request.block_ids) * self.limits.block_size
        return min(count, held - request.num_computed_tokens)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Make the first of the waiting run, if it need not wait for a prefix and there is room for it."""
        if self.waiting.num_parked >= len(self.free_slots) and self.waiting.parks_before(request.rank):
            plan.has_room = False  # these go first, and no more are looked at than can run
            return False
        hits = self._find_prefix(request)
        if hits is None:
            return False
        new = self._num_blocks(request.num_tokens) - len(hits)
        while True:
            needed = new + self.pool.num_unheld(hits)
            if (
                self.free_slots
                and needed + self._num_wanted_before(request, plan) <= self.pool.num_free_blocks
            ):
                break
            if not self._make_way(request, needed, plan, hits):
                plan.has_room = False
                plan.num_kept = needed
                return False
        first = self.waiting.pop()
        assert first is request
        self._start(request, hits)
        if plan.num_wanted is not None:
            plan.num_wanted += self._num_wanted(request)
        return True

    def _find_prefix(self, request: Request) -> list[int] | None:
        """Cached blocks of a waiting request's tokens; None, and it is parked, if more are being computed.

        The last token is left to compute in any case: the next one is sampled from its row.
        """
        if not self.options.enable_prefix_caching:
            return []
        root = root_digest(request.cache_salt, self._cache_generation)
        if request.prefix is None or request.prefix.root != root:
            request.prefix = PrefixKeys(root, self.limits.block_size)
        request.prefix.extend(request)
        usable = request.num_tokens - 1
        if request.prompt_scores is not None and not self.limits.keeps_hidden:
            usable = min(usable, request.prompt_scores.num_done_from_start())
        keys = request.prefix.keys[: usable // self.limits.block_size]
        hits = self.pool.find(keys)
        awaited = None
        for key in keys[len(hits) :]:
            owner = self.promises.get(key.digest)
            # Whoever ranks behind may have to give way to this request, so it is not waited for.
            if owner is None or owner.rank > request.rank:
                break
            awaited = key.digest
        if awaited is None:
            return hits
        self.waiting.park(awaited)
        return None

    def _start(self, request: Request, hits: list[int]) -> None:
        """Give a request taken from the queue its slot and the cached blocks of its prefix."""
        self.pool.hold(hits)
        request.status = RequestStatus.RUNNING
        request.slot = self.free_slots.pop()
        request.block_ids = hits
        request.num_published_blocks = len(hits)
        request.num_computed_tokens = request.num_ready_tokens = len(hits) * self.limits.block_size
        insort(self.running, request, key=_RANK)
        if request.prompt_scores is not None:
            copy_scores(self.pool, request, request.prompt_scores, self.limits.block_size)
        for key in request.prefix.keys[len(hits) :] if request.prefix else ():
            self.promises.setdefault(key.digest, request)
        self._count_start(request)

    def _count_start(self, request: Request) -> None:
        num_hits = request.num_computed_tokens
        if request.num_cached_tokens is None:
            self.newly_started.append(request)
            request.num_cached_tokens = num_hits
            self.counters.prompt_tokens += request.num_prompt_tokens
        if request.num_admissions and num_hits:
            self.counters.num_resumed_with_hits += 1
        request.num_admissions += 1
        if self.options.enable_prefix_caching:
            self.counters.prefix_cache_queries += request.num_tokens
            self.counters.prefix_cache_hits += num_hits

    def _make_way(self, request: Request, num_blocks: int, plan: StepPlan, hits: Sequence[int] = ()) -> bool:
        """Have the worst-ranked running request give way to one that ranks before it.

        False where there is none, or where what leaving requests hold will do: wait for that. Their blocks
        that are ``hits`` of the request are none that it can fill.
        """
        victim = self.running[-1] if self.running else request
        if victim.rank <= request.rank:
            return False
        held = {block for one in self.leaving for block in one.block_ids} - set(hits)
        coming = sum(self.pool.num_holders(block) == 1 for block in held)
        if self.leaving and self.pool.num_free_blocks + coming >= num_blocks:
            return False
        self.counters.num_preemptions += 1
        victim.num_preemptions += 1
        if plan.num_wanted is not None:
            plan.num_wanted -= self._num_wanted(victim)
        self._stop_running(victim, RequestStatus.LEAVING)
        self._leave_if_landed(victim)
        return True

    def _stop_running(self, request: Request, status: RequestStatus) -> None:
        place = bisect_left(self.running, request.rank, key=_RANK)
        assert self.running[place] is request
        del self.running[place]
        request.status = status
        self.leaving.add(request)
        for key in request.prefix.keys[request.num_published_blocks :] if request.prefix else ():
            self._keep_promise(key, request)

    def _leave_if_landed(self, request: Request) -> None:
        """Free what a request holds that no longer runs, once no submitted step can touch it."""
        if request.num_steps_in_flight or request not in self.leaving:
            return
        self.leaving.remove(request)
        assert request.slot is not None
        self.pool.release(request.block_ids)
        self.free_slots.append(request.slot)
        request.let_go()
        if request.status is RequestStatus.LEAVING:
            request.status = RequestStatus.WAITING
            self.waiting.add(request)

    def _publish(self, request: Request) -> None:
        """Offer the blocks that have just been filled, whatever filled them."""
        if request.prefix is None:
            return
        num_full = request.num_ready_tokens // self.limits.block_size
        request.prefix.extend(request)
        for index in range(request.num_published_blocks, num_full):
            key = request.prefix.keys[index]
            self.pool.publish(request.block_ids[index], key)
            self._keep_promise(key, request)
        request.num_published_blocks = num_full

    def _keep_promise(self, key: BlockKey, request: Request) -> None:
        """End a promise, kept or broken: whoever waited for the block looks for itself."""
        if self.promises.get(key.digest) is request:
            del self.promises[key.digest]
            self.waiting.unpark(key.digest)

    def _num_wanted_before(self, request: Request, plan: StepPlan) -> int:
        """Blocks that running requests which rank before this one soon want: mostly all that run."""
        num_before = bisect_left(self.running, request.rank, key=_RANK)
        if num_before < len(self.running):
            return sum(map(self._num_wanted, self.running[:num_before]))
        if plan.num_wanted is None:
            plan.num_wanted = sum(map(self._num_wanted, self.running))
        return plan.num_wanted

    def _num_wanted(self, request: Request) -> int:
        """Blocks that a running request wants yet for its known tokens and one block's worth of others."""
        soon = min(request.num_tokens + self.limits.block_size, request.max_cached_tokens)
        return max(0, self._num_blocks(soon) - len(request.block_ids))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
