"""Work on texts, such as encoding: in few threads, within bounds, and only while somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from loadproof.server.deadline import Deadline
from loadproof.server.errors import too_busy

_T = TypeVar("_T")
_P = ParamSpec("_P")
_THREADS = 2
MOST_SHORT = 16 << 10  # bytes: some ten milliseconds


class Encoder:
    """Runs functions in threads of its own: at most ``max_waiting + num_threads`` run or wait.

    Long ones have ``num_threads``, and short ones one more to themselves: a long text takes a second that
    can't be cut short, and a few of them would keep everybody else waiting for that.
    """

    def __init__(self, max_waiting: int, num_threads: int = _THREADS) -> None:
        self._limit = max_waiting + num_threads
        self._for_long = ThreadPoolExecutor(num_threads, thread_name_prefix="encoder")
        self._for_short = ThreadPoolExecutor(1, thread_name_prefix="encoder-short")
        self._lock = threading.Lock()
        self._num = 0

    @property
    def num_unfinished(self) -> int:
        """How many run or wait; what nobody waits for counts while it runs."""
        return self._num

    async def run(
        self,
        deadline: Deadline | None,
        size: int,
        function: Callable[_P, _T],
        *args: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        """What ``function`` returns, which works on about ``size`` bytes.

        Where the caller is cancelled it isn't begun, or its result is dropped. Raises :class:`ApiError` where
        too many wait already, and where the deadline passes.
        """
        with self._lock:
            if self._num >= self._limit:
                raise too_busy(f"{self._num} texts are being encoded or wait for that: no more may.", 1)
            self._num += 1
        pool = self._for_short if size <= MOST_SHORT else self._for_long
        work = pool.submit(function, *args, **options)
        work.add_done_callback(self._ended)
        limit = asyncio.timeout_at(None if deadline is None else deadline.at)
        try:
            async with limit:
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if deadline is None or not limit.expired():
                raise
            raise deadline.error() from None

    def _ended(self, _: Future[_T]) -> None:
        with self._lock:
            self._num -= 1
