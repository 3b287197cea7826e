"""What those who measure the server are told about requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from loadproof.engine.output import RequestOutput
from loadproof.engine.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class RequestTimes:
    """When a request got on, by ``time.perf_counter``. The engine's thread writes it, until the end."""

    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    """The first of its completions left the queue."""
    first_token: float | None = None
    """The first token of any of its completions was there."""
    last_token: float | None = None
    ended: float | None = None


class Observer(Protocol):
    """Hears, in the engine's thread, how requests get on; times are seconds. Is quick, and never raises."""

    def started(self, queue_seconds: float) -> None:
        """A request runs for the first time, so long after it came."""

    def first_token(self, seconds: float) -> None:
        """A sequence has its first token, so long after its request came."""

    def next_token(self, seconds: float) -> None:
        """A sequence has another token, so long after the one before it."""

    def finished(self, output: RequestOutput, params: SamplingParams, times: RequestTimes) -> None:
        """A request has ended, or was aborted."""


class NoObserver:
    """Hears nothing."""

    def started(self, queue_seconds: float) -> None:
        """See :class:`Observer`."""

    def first_token(self, seconds: float) -> None:
        """See :class:`Observer`."""

    def next_token(self, seconds: float) -> None:
        """See :class:`Observer`."""

    def finished(self, output: RequestOutput, params: SamplingParams, times: RequestTimes) -> None:
        """See :class:`Observer`."""
