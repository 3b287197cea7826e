"""A span for each generation, with OpenTelemetry's attributes of generative models."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from loadproof import __version__
from loadproof.engine.sampling_params import SamplingParams
from loadproof.server.request_record import RequestRecord

# By route; the first two are the convention's own words.
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/score": "score"}
_EXPORT_SECONDS = 5.0
_CLOSE_SECONDS = 3.0

_Attributes = Iterator[tuple[str, AttributeValue | None]]


def exporting_provider(endpoint: str) -> TracerProvider:
    """A provider that sends spans to ``endpoint`` from a thread of its own.

    OpenTelemetry's environment variables may set the rest: headers, batches, sampling, the resource.
    """
    name = os.environ.get("OTEL_SERVICE_NAME", "loadproof")
    resource = Resource.create({"service.name": name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Spans:
    """Writes a span for each generation, once it is over; a child of the caller's, if that named one."""

    def __init__(self, provider: TracerProvider, model_name: str, system_fingerprint: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("loadproof", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._fingerprint = system_fingerprint

    def finished(self, record: RequestRecord) -> None:
        """Write a request's span, if it is for a generation."""
        operation = _OPERATIONS.get(record.handler)
        if operation is None or record.method != "POST":
            return
        attributes = dict(self._attributes(record, operation))
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=record.began_ns,
        )
        if "error.type" in attributes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.began_ns + int(record.seconds * 1e9))

    def close(self) -> None:
        """Send what is left, unless that takes long."""
        # The provider's own close may wait for half a minute where nobody answers at the endpoint.
        thread = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

    def _attributes(self, record: RequestRecord, operation: str) -> _Attributes:
        yield "gen_ai.operation.name", operation
        yield "gen_ai.provider.name", "loadproof"
        yield "gen_ai.request.model", self._model_name
        yield "gen_ai.request.id", record.request_id
        yield "http.request.method", record.method
        yield "http.route", record.handler
        yield "http.response.status_code", record.status
        if record.asks:
            yield from _request_attributes(record.asks[0].params)
        if record.outputs:
            yield "gen_ai.response.model", self._model_name
            yield "openai.response.system_fingerprint", self._fingerprint
        yield from _usage_attributes(record)
        yield from _latency_attributes(record)
        if record.error is not None:
            yield "error.type", record.error


def _request_attributes(params: SamplingParams) -> _Attributes:
    yield "gen_ai.request.choice.count", params.n
    yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.top_k", params.top_k if params.top_k > 0 else None
    yield "gen_ai.request.seed", _int64(params.seed)
    yield "gen_ai.request.frequency_penalty", params.frequency_penalty
    yield "gen_ai.request.presence_penalty", params.presence_penalty
    yield "gen_ai.request.stop_sequences", tuple(params.stop) or None


def _usage_attributes(record: RequestRecord) -> _Attributes:
    yield "gen_ai.usage.input_tokens", record.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", record.num_output_tokens
    outputs = record.outputs
    if outputs:
        yield "gen_ai.usage.cache_read.input_tokens", sum(output.num_cached_tokens for output in outputs)
        yield (
            "gen_ai.response.finish_reasons",
            [str(completion.finish_reason) for output in outputs for completion in output.outputs],
        )


def _latency_attributes(record: RequestRecord) -> _Attributes:
    """Seconds, under the names that vLLM gives them; of several prompts, those of the first to get so far."""
    times = [stream.times for stream in record.streams]
    queued = [one.started - one.arrived for one in times if one.started is not None]
    waited = [one.first_token - one.arrived for one in times if one.first_token is not None]
    yield "gen_ai.latency.time_in_queue", min(queued, default=None)
    yield "gen_ai.latency.time_to_first_token", min(waited, default=None)
    yield "gen_ai.latency.e2e", record.seconds


def _int64(seed: int | None) -> int | str | None:
    """Attributes are integers of 64 bits with a sign; seeds may be larger."""
    return seed if seed is None or -(2**63) <= seed < 2**63 else str(seed)
