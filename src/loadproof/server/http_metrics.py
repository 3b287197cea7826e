"""Metrics of HTTP requests, by route, method and status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from loadproof.server.histogram import Histogram
from loadproof.server.request_record import NO_ANSWER, RequestRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# There are as many series as labels differ, so clients must not make them up.
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class HttpMetrics:
    """Counts requests that are over; belongs to the event loop."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def finished(self, record: RequestRecord) -> None:
        """Count a request."""
        method = record.method if record.method in _METHODS else "other"
        self._requests[record.handler, method, str(record.status or NO_ANSWER)] += 1
        self._seconds.setdefault((record.handler, method), Histogram(_SECONDS)).observe(record.seconds)

    def families(self) -> Iterator[Metric]:
        """What was counted, for a registry."""
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests that are over.", labels=("handler", "method", "status")
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's head to the end of its answer.",
            labels=("handler", "method"),
        )
        for where, histogram in self._seconds.items():
            seconds.add_metric(where, histogram.buckets(), histogram.total)
        yield seconds
