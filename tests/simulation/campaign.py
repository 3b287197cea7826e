"""Many scenarios, one seed after the other, in this process or in several."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from itertools import count
from multiprocessing import get_context

from tests.simulation.simulator import simulate
from tests.simulation.summary import Summary

SEEDS_A_TASK = 8


def campaign(num_steps: int, seed: int, jobs: int = 1) -> Generator[Summary, None, None]:
    """Summaries of scenarios ``seed``, ``seed + 1``, ... in that order, until they have made ``num_steps``.

    Raises :class:`SimulationError` of the first seed that fails, whatever ``jobs`` is.
    """
    done = 0
    with closing(_in_order(seed, jobs) if jobs > 1 else map_seeds(seed)) as summaries:
        for summary in summaries:
            yield summary
            done += summary.steps
            if done >= num_steps:
                return


def map_seeds(seed: int) -> Generator[Summary, None, None]:
    """Scenarios without end, in this process."""
    yield from map(simulate, count(seed))


def _in_order(seed: int, jobs: int) -> Generator[Summary, None, None]:
    """Scenarios without end, computed by ``jobs`` processes a little ahead of the reader."""
    tasks: deque[Future[list[Summary]]] = deque()
    # Spawned: a fork of a process with threads, such as the tests', may hang.
    executor = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        for first in count(seed, SEEDS_A_TASK):
            tasks.append(executor.submit(_simulate_some, first))
            if len(tasks) > 2 * jobs:
                yield from tasks.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def _simulate_some(first: int) -> list[Summary]:
    return [simulate(seed) for seed in range(first, first + SEEDS_A_TASK)]
