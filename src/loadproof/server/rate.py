"""How fast requests finish, for the ``Retry-After`` of those that find no room."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MEMORY = 0.9  # how much of the rate the one before counts
_MOST_SECONDS = 60


class Rate:
    """How many sequences finish a second, of late, while there are any: idle time says nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = 0.0
        self._began: float | None = None
        self._seconds = 0.0
        self._count = 0

    def set_busy(self, busy: bool) -> None:
        """Tell whether there is work from now on."""
        if busy and self._began is None:
            self._began = self._clock()
        elif not busy and self._began is not None:
            self._seconds += self._clock() - self._began
            self._began = None

    def count(self, num: int) -> None:
        """So many have finished now."""
        self._count += num
        if self._began is not None:
            now = self._clock()
            self._seconds += now - self._began
            self._began = now
        if self._seconds >= 1.0:
            rate = self._count / self._seconds
            self._rate = rate if self._rate == 0.0 else _MEMORY * self._rate + (1 - _MEMORY) * rate
            self._seconds, self._count = 0.0, 0

    def seconds_for(self, num: int) -> int:
        """Whole seconds until so many will have finished; from 1 to 60."""
        return max(1, min(_MOST_SECONDS, math.ceil(num / self._rate))) if self._rate > 0.0 else 1
