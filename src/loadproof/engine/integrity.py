"""Whether a scheduler's pool, queues and requests agree: asked of idle engines, and after steps at will."""

from __future__ import annotations

from collections import Counter

from loadproof.engine.invariant import require
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.scheduler import Scheduler


def check_integrity(scheduler: Scheduler, max_steps_in_flight: int) -> None:
    """Raise :class:`IntegrityError` for the first thing that does not hold. Linear in blocks and requests."""
    holding = [*scheduler.running, *scheduler.leaving]
    _check_queues(scheduler)
    _check_slots(scheduler, holding)
    _check_blocks(scheduler, holding)
    for request in scheduler.waiting.requests():
        _check_waiting(request)
    for request in holding:
        _check_holding(request, scheduler.limits.block_size, max_steps_in_flight)


def check_idle(scheduler: Scheduler) -> None:
    """Raise :class:`IntegrityError` where an engine without requests still holds something."""
    check_integrity(scheduler, 0)
    require(not scheduler.has_unfinished(), "an idle engine has requests")
    require(not scheduler.leaving, "an idle engine has requests that are leaving")
    require(scheduler.pool.num_free_blocks == scheduler.limits.num_blocks, "an idle engine holds blocks")


def _check_queues(scheduler: Scheduler) -> None:
    ranks = [request.rank for request in scheduler.running]
    require(ranks == sorted(set(ranks)), "running requests are out of order")
    for request in scheduler.running:
        require(request.status is RequestStatus.RUNNING, "{} runs as {}", request.key, request.status)
    for request in scheduler.leaving:
        left = request.status in (RequestStatus.LEAVING, RequestStatus.FINISHED)
        require(left and request.num_steps_in_flight > 0, "{} is leaving for no reason", request.key)
    waiting = scheduler.waiting.requests()
    require(len(waiting) == len(scheduler.waiting), "the waiting queue miscounts")
    require(len({request.rank for request in waiting}) == len(waiting), "a request waits twice")
    for digest in scheduler.waiting.awaited():
        require(digest in scheduler.promises, "a request waits for a block that nobody computes")
    for digest, owner in scheduler.promises.items():
        require(owner.status is RequestStatus.RUNNING, "{} promises a block and does not run", owner.key)
        unpublished = owner.prefix.keys[owner.num_published_blocks :] if owner.prefix else []
        require(any(key.digest == digest for key in unpublished), "{} promises another's block", owner.key)


def _check_slots(scheduler: Scheduler, holding: list[Request]) -> None:
    slots = [request.slot for request in holding] + scheduler.free_slots
    require(
        len(slots) == scheduler.limits.max_num_seqs and set(slots) == set(range(len(slots))),
        "slots are lost or doubled",
    )


def _check_blocks(scheduler: Scheduler, holding: list[Request]) -> None:
    pool = scheduler.pool
    held = Counter(block for request in holding for block in request.block_ids)
    for block in range(pool.num_blocks):
        count = pool.num_holders(block)
        require(count == held[block], "block {} has {} holders, and {} requests", block, count, held[block])
    pool.check_integrity()
    for request in holding:
        require(len(set(request.block_ids)) == len(request.block_ids), "{} has a block twice", request.key)
        for block in request.block_ids[request.num_published_blocks :]:
            require(held[block] == 1, "block {} is shared before its contents exist", block)


def _check_waiting(request: Request) -> None:
    key = request.key
    require(request.status is RequestStatus.WAITING, "{} waits as {}", key, request.status)
    require(request.slot is None and not request.block_ids, "{} waits and holds something", key)
    require(
        request.num_steps_in_flight == request.num_pending_tokens == 0,
        "{} waits, with a step on its way",
        key,
    )
    require(request.num_computed_tokens == request.num_ready_tokens == 0, "{} waits as if computed", key)


def _check_holding(request: Request, block_size: int, max_steps_in_flight: int) -> None:
    key = request.key
    computed, ready = request.num_computed_tokens, request.num_ready_tokens
    require(
        0 <= request.num_pending_tokens <= request.num_steps_in_flight, "{} miscounts pending tokens", key
    )
    require(request.num_steps_in_flight <= max_steps_in_flight, "{} has too many steps in flight", key)
    require(ready <= computed <= len(request.block_ids) * block_size, "{} computed more than it has", key)
    require(request.num_published_blocks * block_size <= ready, "{} published what isn't there", key)
    if request.num_steps_in_flight == 0:
        require(ready == computed, "{} has computed positions that no step brought", key)
    if request.status is RequestStatus.RUNNING:
        known = request.num_tokens + request.num_pending_tokens
        require(computed < known or request.num_pending_tokens > 0, "{} has nothing to compute", key)
        # Whoever has just got its last token is finished by the engine after this check.
        require(len(request.output_token_ids) <= request.max_tokens, "{} runs past its length", key)
