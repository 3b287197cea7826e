"""Metrics of the server in Prometheus' text format, named as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from loadproof.engine.output import RequestOutput


class Metrics:
    """Hears of every request (an :class:`~loadproof.server.observer.Observer`) and writes what it heard."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._registry = CollectorRegistry()

    def started(self, queue_seconds: float) -> None:
        """See Observer."""

    def first_token(self, seconds: float) -> None:
        """See Observer."""

    def next_token(self, seconds: float) -> None:
        """See Observer."""

    def finished(self, output: RequestOutput, seconds: float) -> None:
        """See Observer."""

    def exposition(self, stats: Mapping[str, int]) -> tuple[bytes, str]:
        """The metrics page and its content type; ``stats`` are the engine's counters now."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
