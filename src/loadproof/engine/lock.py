"""The engine's lock: its holder may take it again, and those who wait get their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """Like ``threading.RLock``, but a thread that takes it over and over can't keep others out.

    Whoever comes stands behind the one that came last: a holder who comes again is after all who wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = threading.Lock()  # held by the one that came last, until it has left
        self._holder = (0, threading.Lock())  # a thread, and what is locked as long as it is the holder

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; an interrupt at any place lets go of it."""
        this = threading.get_ident()
        if self._is_holder(this):
            yield
            return
        # A with statement on a lock itself takes it and sees to its release in one, whatever interrupts.
        mine, holding = threading.Lock(), threading.Lock()
        with mine:
            before, self._last = self._last, mine
            # The second keeps others out where one in the row was interrupted, or two stand behind the same.
            with before, self._lock, holding:
                self._holder = (this, holding)
                yield

    @contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Hold the lock, out of turn, unless somebody does, this thread included; gives whether it is held.

        Never waits: for what may run within any call, :meth:`held` itself too.
        """
        taken: list[bool] = []
        try:
            # Taken and noted in one call: there is no place between for an interrupt.
            taken.extend(map(self._lock.acquire, (False,)))
            if not taken[0]:
                yield False
                return
            holding = threading.Lock()
            with holding:
                self._holder = (threading.get_ident(), holding)
                yield True
        finally:
            if True in taken:
                self._lock.release()

    def _is_holder(self, thread: int) -> bool:
        holder, holding = self._holder
        return holder == thread and holding.locked()
