"""Interrupts at every place of a call where Python looks for signals, one after the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import loadproof

PACKAGE = str(Path(loadproof.__file__).parent)


class Interrupt:
    """Raises :class:`KeyboardInterrupt` at the n-th place, from 1, that is passed after :meth:`arm`.

    Places are where one of the package's functions begins, or goes on after a call into C: with jumps back,
    these are all where Python looks for signals. What manages its contexts counts as the package's own.
    """

    def __init__(self, n: int) -> None:
        self._num_left = n

    @property
    def came(self) -> bool:
        """Whether there was an n-th place."""
        return self._num_left <= 0

    def arm(self) -> None:
        sys.setprofile(self._look)

    def disarm(self) -> None:
        sys.setprofile(None)

    def within(self, call: Callable[[], object]) -> None:
        """Make a call, armed before it or within it, and disarm."""
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            self.disarm()

    def _look(self, frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "c_return") or not (file.startswith(PACKAGE) or file == contextlib.__file__):
            return
        self._num_left -= 1
        if self._num_left == 0:
            raise KeyboardInterrupt  # which ends the profiling, too
