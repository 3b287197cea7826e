"""What those who measure the server are told about requests."""

from __future__ import annotations

from typing import Protocol

from loadproof.engine.output import RequestOutput


class Observer(Protocol):
    """Hears, in the engine's thread, how requests get on; times are seconds. Is quick, and never raises."""

    def started(self, queue_seconds: float) -> None:
        """A request runs for the first time, so long after it came."""

    def first_token(self, seconds: float) -> None:
        """A sequence has its first token, so long after its request came."""

    def next_token(self, seconds: float) -> None:
        """A sequence has another token, so long after the one before it."""

    def finished(self, output: RequestOutput, seconds: float) -> None:
        """A request has ended, or was aborted, so long after it came."""


class NoObserver:
    """Hears nothing."""

    def started(self, queue_seconds: float) -> None:
        """See :class:`Observer`."""

    def first_token(self, seconds: float) -> None:
        """See :class:`Observer`."""

    def next_token(self, seconds: float) -> None:
        """See :class:`Observer`."""

    def finished(self, output: RequestOutput, seconds: float) -> None:
        """See :class:`Observer`."""
