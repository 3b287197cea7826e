"""Metrics of the server in Prometheus' text format, named as vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loadproof import __version__
from loadproof.engine.output import RequestOutput
from loadproof.engine.request import CUT_OFF
from loadproof.engine.sampling_params import SamplingParams
from loadproof.server.histogram import Histogram, token_bounds
from loadproof.server.http_metrics import HttpMetrics
from loadproof.server.metric_names import ENGINE_COUNTERS, ENGINE_GAUGES, HISTOGRAMS, OLDER_NAMES
from loadproof.server.observer import RequestTimes

if TYPE_CHECKING:
    from loadproof.llm import LLM

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Hears of every request, and writes what it heard.

    It is an :class:`~loadproof.server.observer.Observer`, called in the engine's thread for every token. The
    rest belongs to the event loop, which may read while that writes. What the engine counts itself is taken
    from its ``stats``, the latest there are. ``http`` are the requests as the server sees them.
    """

    def __init__(self, prefix: str, llm: LLM) -> None:
        self.http = HttpMetrics()
        self._prefix = prefix
        self._labels = {"model_name": llm.model_name, "engine": "0"}
        self._infos = _infos(llm)
        self._stats: Mapping[str, int] = llm.engine.stats()
        self._stats_time = time.monotonic()
        self._alive = True
        tokens = token_bounds(llm.max_model_len)
        self._histograms = {name: Histogram(bounds or tokens) for name, (bounds, _) in HISTOGRAMS.items()}
        self._reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        # For every token there is one call: nothing is looked up there.
        self._observe_first = self._histograms["time_to_first_token_seconds"].observe
        self._observe_next = self._histograms["inter_token_latency_seconds"].observe
        # Not the process's own registry: there may be several servers in it.
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self._families))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    # The engine's thread.

    def started(self, queue_seconds: float) -> None:
        """See Observer."""
        self._histograms["request_queue_time_seconds"].observe(queue_seconds)

    def first_token(self, seconds: float) -> None:
        """See Observer."""
        self._observe_first(seconds)

    def next_token(self, seconds: float) -> None:
        """See Observer."""
        self._observe_next(seconds)

    def finished(self, output: RequestOutput, params: SamplingParams, times: RequestTimes) -> None:
        """See Observer. Sizes and times are of requests that weren't aborted."""
        reasons = [completion.finish_reason for completion in output.outputs]
        for reason in reasons:
            if reason is not None:
                self._reasons[reason] += 1
        if not CUT_OFF.isdisjoint(reasons):
            return
        lengths = [len(completion.token_ids) for completion in output.outputs]
        self._observe_sizes(output, lengths, params)
        self._observe_times(times, max(lengths))

    def _observe_sizes(self, output: RequestOutput, lengths: list[int], params: SamplingParams) -> None:
        histograms = self._histograms
        num_prompt = len(output.prompt_token_ids)
        histograms["request_prompt_tokens"].observe(num_prompt)
        histograms["request_prefill_kv_computed_tokens"].observe(num_prompt - output.num_cached_tokens)
        for length in lengths:
            histograms["request_generation_tokens"].observe(length)
        histograms["request_max_num_generation_tokens"].observe(max(lengths))
        histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(params.max_tokens)

    def _observe_times(self, times: RequestTimes, length: int) -> None:
        started, first, last, ended = times.started, times.first_token, times.last_token, times.ended
        if started is None or first is None or last is None or ended is None:
            return  # it had nothing to generate
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(ended - times.arrived)
        histograms["request_prefill_time_seconds"].observe(first - started)
        histograms["request_decode_time_seconds"].observe(last - first)
        histograms["request_inference_time_seconds"].observe(last - started)
        if length > 1:
            mean = (last - first) / (length - 1)
            histograms["request_time_per_output_token_seconds"].observe(mean)

    # The event loop.

    def update(self, stats: Mapping[str, int] | None, *, alive: bool) -> None:
        """Take in the engine's counters, None if it didn't give any, and whether its thread runs."""
        self._alive = alive
        if stats is not None:
            self._stats, self._stats_time = stats, time.monotonic()

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)

    def _families(self) -> Iterator[Metric]:
        yield from self._engine_families()
        yield from self._request_families()
        for name, (labels, documentation) in self._infos.items():
            yield self._gauge(name, documentation, 1, labels)
        yield from self.http.families()

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._stats
        for key, (name, documentation) in ENGINE_GAUGES.items():
            yield self._gauge(name, documentation, stats[key])
        used = 1.0 - stats["num_free_blocks"] / stats["num_blocks"]
        yield self._gauge("kv_cache_usage_perc", "Share of blocks in use, from 0 to 1.", used)
        for key, (name, documentation) in ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(self._name(name), documentation, labels=tuple(self._labels))
            counter.add_metric(tuple(self._labels.values()), stats[key])
            yield counter
        yield self._gauge("engine_alive", "1 while the engine's thread runs, else 0.", float(self._alive))
        age = time.monotonic() - self._stats_time
        yield self._gauge("engine_stats_age_seconds", "Since when the engine hasn't told its numbers.", age)

    def _request_families(self) -> Iterator[Metric]:
        reasons = CounterMetricFamily(
            self._name("request_success"),
            "Sequences that have ended, by how.",
            labels=(*self._labels, "finished_reason"),
        )
        for reason, count in self._reasons.items():
            reasons.add_metric((*self._labels.values(), reason), count)
        yield reasons
        for name, histogram in self._histograms.items():
            yield self._histogram(name, HISTOGRAMS[name][1], histogram)
        for older, name in OLDER_NAMES.items():
            yield self._histogram(older, f"The older name of {name}.", self._histograms[name])

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _gauge(
        self, name: str, documentation: str, value: float, more: Mapping[str, str] | None = None
    ) -> GaugeMetricFamily:
        labels = {**self._labels, **(more or {})}
        gauge = GaugeMetricFamily(self._name(name), documentation, labels=tuple(labels))
        gauge.add_metric(tuple(labels.values()), value)
        return gauge

    def _histogram(self, name: str, documentation: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._name(name), documentation, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), histogram.buckets(), histogram.total)
        return family


class _Collector(Collector):
    """What a registry asks."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        return self._families()


def _infos(llm: LLM) -> dict[str, tuple[dict[str, str], str]]:
    """Metrics that are always 1, and say all by their labels."""
    limits = llm.engine.device.limits
    cache = {
        "block_size": str(limits.block_size),
        "num_gpu_blocks": str(limits.num_blocks),  # dashboards know them by this name, whatever the device
        "enable_prefix_caching": str(llm.config.enable_prefix_caching),
    }
    build = {"version": __version__, "system_fingerprint": llm.system_fingerprint}
    return {
        "cache_config_info": (cache, "How the key-value cache is set up."),
        "build_info": (build, "What answers depend on besides the request."),
    }
