from __future__ import annotations

import pytest
from tests.fake_device import small_limits

from loadproof import SamplingParams
from loadproof.devices.device import DeviceLimits
from loadproof.engine.integrity import check_idle
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.scheduler import Scheduler


def _request(name: str, num_prompt: int, max_tokens: int = 4) -> Request:
    tokens = [ord(name)] * num_prompt
    return Request(name, 0, tokens, SamplingParams(), 0, max_tokens, frozenset())


def _step(scheduler: Scheduler) -> list[tuple[str, int, bool]]:
    """Schedule and advance one step, sampling token 7, and finish whoever reached its length."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        scheduler.retire(chunk, 7 if chunk.samples else None)
        if len(chunk.request.output_token_ids) == chunk.request.max_tokens:
            scheduler.finish(chunk.request, "length")
    return [(chunk.request.request_id, chunk.num_tokens, chunk.samples) for chunk in chunks]


def _scheduler(limits: DeviceLimits, *requests: Request) -> Scheduler:
    scheduler = Scheduler(limits)
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_a_long_prompt_is_split_by_the_budget() -> None:
    scheduler = _scheduler(small_limits(max_num_batched_tokens=16), _request("a", 40, 2))
    assert [_step(scheduler) for _ in range(4)] == [
        [("a", 16, False)],
        [("a", 16, False)],
        [("a", 8, True)],
        [("a", 1, True)],
    ]
    assert not scheduler.has_unfinished()
    check_idle(scheduler)


def test_decodes_and_prompts_share_one_budget() -> None:
    scheduler = _scheduler(small_limits(max_num_batched_tokens=16), _request("a", 4), _request("b", 30))
    assert _step(scheduler) == [("a", 4, True), ("b", 12, False)]
    assert _step(scheduler) == [("a", 1, True), ("b", 15, False)]
    assert _step(scheduler) == [("a", 1, True), ("b", 3, True)]


def test_the_first_to_come_are_served_first_when_the_budget_is_short() -> None:
    requests = [_request(name, 1, 2) for name in "abcd"]
    scheduler = _scheduler(small_limits(max_num_batched_tokens=2), *requests)
    assert _step(scheduler) == [("a", 1, True), ("b", 1, True)]
    assert _step(scheduler) == [("a", 1, True), ("b", 1, True)]
    assert _step(scheduler) == [("c", 1, True), ("d", 1, True)]


def test_a_running_request_without_budget_sits_out() -> None:
    scheduler = _scheduler(small_limits(max_num_batched_tokens=4), _request("a", 2), _request("b", 9))
    assert _step(scheduler) == [("a", 2, True), ("b", 2, False)]
    scheduler.limits = small_limits(max_num_batched_tokens=1)
    assert _step(scheduler) == [("a", 1, True)]
    assert scheduler.counters.num_sat_out_steps == 1


def test_slots_bound_how_many_run() -> None:
    requests = [_request(name, 1, 1) for name in "abc"]
    scheduler = _scheduler(small_limits(max_num_seqs=2), *requests)
    assert _step(scheduler) == [("a", 1, True), ("b", 1, True)]
    assert _step(scheduler) == [("c", 1, True)]


def test_a_request_waits_for_blocks_and_is_not_overtaken() -> None:
    limits = small_limits(max_model_len=64, num_blocks=4)
    big = [_request(name, 40, 2) for name in "ab"]
    scheduler = _scheduler(limits, *big, _request("c", 1, 1))
    assert _step(scheduler) == [("a", 40, True)]
    assert _step(scheduler) == [("a", 1, True)]
    assert _step(scheduler) == [("b", 40, True), ("c", 1, True)]


@pytest.mark.parametrize("started", [False, True])
def test_finishing_frees_everything(started: bool) -> None:
    scheduler = _scheduler(small_limits(), request := _request("a", 5))
    if started:
        _step(scheduler)
        assert scheduler.pool.num_free_blocks < scheduler.pool.num_blocks
    scheduler.finish(request, "abort")
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason == "abort"
    assert request.slot is None
    check_idle(scheduler)


@pytest.mark.skipif(not __debug__, reason="asserts are off")
def test_finishing_twice_is_asserted() -> None:
    scheduler = _scheduler(small_limits(), request := _request("a", 5))
    scheduler.finish(request, "abort")
    with pytest.raises(AssertionError, match="finished twice"):
        scheduler.finish(request, "abort")
