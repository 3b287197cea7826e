"""Whether a scheduler's pool, queues and requests agree: asked of idle engines, and after steps at will."""

from __future__ import annotations

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
        require(request.status is RequestStatus.RUNNING, "{0.key} runs as {0.status}", request)
    for request in scheduler.leaving:
        left = request.status in (RequestStatus.LEAVING, RequestStatus.FINISHED)
        require(left and request.num_steps_in_flight > 0, "{0.key} is leaving for no reason", request)
    waiting = scheduler.waiting.requests()
    require(len(waiting) == len(scheduler.waiting), "the waiting queue miscounts")
    require(len({request.rank for request in waiting}) == len(waiting), "a request waits twice")
    for digest in scheduler.waiting.awaited():
        require(digest in scheduler.promises, "a request waits for a block that nobody computes")
    for digest, owner in scheduler.promises.items():
        require(owner.status is RequestStatus.RUNNING, "{0.key} promises a block and does not run", owner)
        unpublished = owner.prefix.keys[owner.num_published_blocks :] if owner.prefix else []
        require(any(key.digest == digest for key in unpublished), "{0.key} promises another's block", owner)


def _check_slots(scheduler: Scheduler, holding: list[Request]) -> None:
    slots = [request.slot for request in holding] + scheduler.free_slots
    require(
        len(slots) == scheduler.limits.max_num_seqs and set(slots) == set(range(len(slots))),
        "slots are lost or doubled",
    )


def _check_blocks(scheduler: Scheduler, holding: list[Request]) -> None:
    pool = scheduler.pool
    held = [0] * pool.num_blocks
    for request in holding:
        require(len(set(request.block_ids)) == len(request.block_ids), "{0.key} has a block twice", request)
        for block in request.block_ids:
            held[block] += 1
    for block in pool.differently_held(held):
        count = pool.num_holders(block)
        require(False, "block {} has {} holders, and {} requests", block, count, held[block])
    pool.check_integrity()
    for request in holding:
        for block in request.block_ids[request.num_published_blocks :]:
            if held[block] > 1:
                require(False, "block {} is shared before its contents exist", block)


def _check_waiting(request: Request) -> None:
    require(request.status is RequestStatus.WAITING, "{0.key} waits as {0.status}", request)
    require(request.slot is None and not request.block_ids, "{0.key} waits and holds something", request)
    require(
        request.num_steps_in_flight == request.num_pending_tokens == 0,
        "{0.key} waits, with a step on its way",
        request,
    )
    require(
        request.num_computed_tokens == request.num_ready_tokens == 0, "{0.key} waits as if computed", request
    )


def _check_holding(request: Request, block_size: int, max_steps_in_flight: int) -> None:
    computed, ready = request.num_computed_tokens, request.num_ready_tokens
    require(
        0 <= request.num_pending_tokens <= request.num_steps_in_flight,
        "{0.key} miscounts pending tokens",
        request,
    )
    require(
        request.num_steps_in_flight <= max_steps_in_flight, "{0.key} has too many steps in flight", request
    )
    require(
        ready <= computed <= len(request.block_ids) * block_size, "{0.key} computed more than it has", request
    )
    require(request.num_published_blocks * block_size <= ready, "{0.key} published what isn't there", request)
    if request.num_steps_in_flight == 0:
        require(ready == computed, "{0.key} has computed positions that no step brought", request)
    if request.status is RequestStatus.RUNNING:
        known = request.num_tokens + request.num_pending_tokens
        require(computed < known or request.num_pending_tokens > 0, "{0.key} has nothing to compute", request)
        # Whoever has just got its last token is finished by the engine after this check.
        require(len(request.output_token_ids) <= request.max_tokens, "{0.key} runs past its length", request)
