"""Every complaint that the check of the books can make, provoked by one thing that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.scheduler_drive import Drive, tokens_of

from loadproof.engine.block_pool import BlockKey
from loadproof.engine.integrity import check_idle, check_integrity
from loadproof.engine.invariant import IntegrityError
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.scheduler import Scheduler


class Scene:
    """A scheduler with a request in every state: two run, one is leaving, one waits and one is parked."""

    def __init__(self) -> None:
        self.drive = Drive(depth=2, policy="priority", seqs=3)
        self.leaving = self.drive.add("c", 9, 9, priority=5)
        self.drive.submit()
        self.first = self.drive.add("a", 9, 9, priority=1)
        self.second = self.drive.add("b", 6, 9, priority=2)
        self.drive.submit()
        self.parked = self.drive.add("p", tokens_of("a", 9), 9, priority=3)
        self.waiting = self.drive.add("w", 5, 9, priority=9)
        self.drive.finish(self.leaving)
        self.drive.submit()
        assert (self.drive.running, self.scheduler.leaving) == ("ab", {self.leaving})
        assert self.scheduler.waiting.num_parked == 1
        check_integrity(self.scheduler, 2)

    @property
    def scheduler(self) -> Scheduler:
        return self.drive.scheduler


def setting(who: str, name: str, value: Any) -> Callable[[Scene], None]:
    """One field of one request gets a wrong value."""
    return lambda scene: setattr(getattr(scene, who), name, value)


def duplicate(request: Request) -> Request:
    twin = Request("twin", 0, [1], request.params, 0, 1, frozenset())
    twin.rank = request.rank
    return twin


def _out_of_order(scene: Scene) -> None:
    scene.scheduler.running.reverse()


def _leaves_for_no_reason(scene: Scene) -> None:
    scene.leaving.num_steps_in_flight = 0


def _waits_twice(scene: Scene) -> None:
    scene.scheduler.waiting.add(duplicate(scene.parked))


def _miscounts_waiting(scene: Scene) -> None:
    scene.scheduler.waiting._num_dropped += 1


def _nobody_computes(scene: Scene) -> None:
    scene.scheduler.promises.clear()


def _promises_without_running(scene: Scene) -> None:
    digest = next(iter(scene.scheduler.promises))
    scene.scheduler.promises[digest] = scene.leaving


def _promises_anothers(scene: Scene) -> None:
    scene.scheduler.promises[b"somebody's"] = scene.first


def _loses_a_slot(scene: Scene) -> None:
    scene.scheduler.free_slots.append(0)


def _doubles_a_slot(scene: Scene) -> None:
    scene.first.slot = scene.second.slot


def _drops_a_block(scene: Scene) -> None:
    scene.first.block_ids.pop()


def _has_a_block_twice(scene: Scene) -> None:
    block = scene.first.block_ids[0]
    scene.first.block_ids.append(block)
    scene.scheduler.pool._holders[block] += 1


def _shares_too_early(scene: Scene) -> None:
    block = scene.first.block_ids[-1]
    scene.second.block_ids.append(block)
    scene.scheduler.pool._holders[block] += 1


def _frees_a_held_block(scene: Scene) -> None:
    scene.scheduler.pool._blank.append(scene.first.block_ids[0])


def _publishes_a_blank_block(scene: Scene) -> None:
    scene.scheduler.pool._keys[scene.scheduler.pool._blank[0]] = BlockKey(b"x", b"x")


def _caches_without_a_key(scene: Scene) -> None:
    pool = scene.scheduler.pool
    pool._cached[pool._blank.pop()] = None


def _forgets_a_key(scene: Scene) -> None:
    scene.scheduler.pool._published[b"x"] = 0


def _computes_beyond_its_blocks(scene: Scene) -> None:
    scene.first.num_computed_tokens = 4 * len(scene.first.block_ids) + 1


def _publishes_what_is_not_there(scene: Scene) -> None:
    promises = scene.scheduler.promises
    scene.scheduler.promises = {key: owner for key, owner in promises.items() if owner is not scene.second}
    scene.second.num_published_blocks = 1


def _has_nothing_to_compute(scene: Scene) -> None:
    scene.first.num_pending_tokens = 0
    scene.first.num_computed_tokens = scene.first.num_tokens


def _computed_by_no_step(scene: Scene) -> None:
    scene.first.num_steps_in_flight = scene.first.num_pending_tokens = 0


WRONG: list[tuple[Callable[[Scene], None], str]] = [
    (_out_of_order, "running requests are out of order"),
    (setting("second", "rank", (1, 1)), "running requests are out of order"),
    (setting("first", "status", RequestStatus.WAITING), "runs as"),
    (_leaves_for_no_reason, "is leaving for no reason"),
    (setting("leaving", "status", RequestStatus.RUNNING), "is leaving for no reason"),
    (_miscounts_waiting, "the waiting queue miscounts"),
    (setting("waiting", "status", RequestStatus.RUNNING), "the waiting queue miscounts"),
    (_waits_twice, "a request waits twice"),
    (_nobody_computes, "waits for a block that nobody computes"),
    (_promises_without_running, "promises a block and does not run"),
    (_promises_anothers, "promises another's block"),
    (setting("first", "num_published_blocks", 2), "promises another's block"),
    (_loses_a_slot, "slots are lost or doubled"),
    (_doubles_a_slot, "slots are lost or doubled"),
    (setting("second", "slot", None), "slots are lost or doubled"),
    (_drops_a_block, "holders, and 0 requests"),
    (_has_a_block_twice, "has a block twice"),
    (_shares_too_early, "is shared before its contents exist"),
    (_frees_a_held_block, "free blocks are lost, doubled or held"),
    (_publishes_a_blank_block, "a blank block is published"),
    (_caches_without_a_key, "a cached block has no key"),
    (_forgets_a_key, "published blocks and their keys disagree"),
    (setting("parked", "status", RequestStatus.RUNNING), "waits as"),
    (setting("waiting", "slot", 1), "waits and holds something"),
    (setting("waiting", "block_ids", [1]), "waits and holds something"),
    (setting("parked", "num_steps_in_flight", 1), "waits, with a step on its way"),
    (setting("waiting", "num_pending_tokens", 1), "waits, with a step on its way"),
    (setting("waiting", "num_computed_tokens", 4), "waits as if computed"),
    (setting("parked", "num_ready_tokens", 4), "waits as if computed"),
    (setting("first", "num_pending_tokens", 3), "miscounts pending tokens"),
    (setting("first", "num_pending_tokens", -1), "miscounts pending tokens"),
    (setting("second", "num_steps_in_flight", 3), "has too many steps in flight"),
    (_computes_beyond_its_blocks, "computed more than it has"),
    (setting("first", "num_ready_tokens", 12), "computed more than it has"),
    (_publishes_what_is_not_there, "published what isn't there"),
    (_computed_by_no_step, "has computed positions that no step brought"),
    (_has_nothing_to_compute, "has nothing to compute"),
    (setting("first", "output_token_ids", [7] * 10), "runs past its length"),
]


@pytest.mark.parametrize(("corrupt", "complaint"), WRONG, ids=[text for _, text in WRONG])
def test_whatever_is_wrong_is_found(corrupt: Callable[[Scene], None], complaint: str) -> None:
    scene = Scene()
    corrupt(scene)
    with pytest.raises(IntegrityError, match=complaint):
        check_integrity(scene.scheduler, 2)


def test_more_steps_in_flight_than_allowed_are_found() -> None:
    with pytest.raises(IntegrityError, match="too many steps in flight"):
        check_integrity(Scene().scheduler, 1)


def test_an_idle_engine_has_nothing() -> None:
    drive = Drive()
    drive.add("a", 9)
    drive.drain()
    check_idle(drive.scheduler)
    drive.scheduler.pool.allocate(1)
    with pytest.raises(IntegrityError, match="1 holders, and 0 requests"):
        check_idle(drive.scheduler)


def test_an_idle_engine_has_no_requests() -> None:
    drive = Drive()
    drive.add("a", 9)
    with pytest.raises(IntegrityError, match="an idle engine has requests"):
        check_idle(drive.scheduler)


def test_an_idle_engine_has_none_that_leave() -> None:
    drive = Drive(depth=2)
    request = drive.add("a", 9)
    drive.submit()
    drive.finish(request)
    request.num_steps_in_flight = 0
    with pytest.raises(IntegrityError, match="leaving"):
        check_idle(drive.scheduler)
