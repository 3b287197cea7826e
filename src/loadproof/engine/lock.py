"""The engine's lock: its holder may take it again, and those who wait get their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class FairLock:
    """Like ``threading.RLock``, but a thread that takes it over and over can't keep others out.

    Whoever waits stands in a turnstile that all others have to pass first, so the last holder comes after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turnstile = threading.Lock()
        self._holder: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; an interrupt at any place lets go of it."""
        this = threading.get_ident()
        if self._holder == this:
            yield
            return
        with ExitStack() as turn:
            turn.enter_context(self._turnstile)
            with self._lock:
                turn.close()
                self._holder = this
                try:
                    yield
                finally:
                    self._holder = None
