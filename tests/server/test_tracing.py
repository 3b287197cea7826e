"""OpenTelemetry spans: one a generation, with what it was asked, what it came to and how long it took."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.server.running import ENGINE, MODEL_NAME, PATIENCE, MakeServer, Running, running

from loadproof import LLM
from loadproof.server import spans as spans_module
from loadproof.server.settings import ServerConfig, ServerConfigError
from loadproof.server.tracing import open_tracing

ENDPOINT = "http://127.0.0.1:1/v1/traces"  # nobody is there
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "seed": 3, "temperature": 0.5}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}

Spans = Callable[[int], list[ReadableSpan]]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Have spans kept in memory; they are given once there are so many."""
    exporter = InMemorySpanExporter()

    def provider(endpoint: str) -> TracerProvider:
        assert endpoint == ENDPOINT
        made = TracerProvider(shutdown_on_exit=False)
        made.add_span_processor(SimpleSpanProcessor(exporter))
        return made

    def read(count: int) -> list[ReadableSpan]:
        end = time.monotonic() + PATIENCE
        while len(exporter.get_finished_spans()) < count and time.monotonic() < end:
            time.sleep(0.002)
        spans = list(exporter.get_finished_spans())
        assert len(spans) == count
        return spans

    monkeypatch.setattr(spans_module, "exporting_provider", provider)
    return read


@pytest.fixture
def served(make_server: MakeServer, memory: Spans) -> Running:
    """A server that writes spans to ``memory``."""
    return make_server(otlp_traces_endpoint=ENDPOINT)


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def test_a_completions_span(served: Running, memory: Spans) -> None:
    http = served.http(headers={"x-request-id": "mine"})
    assert http.post("/v1/completions", json={**BODY, "n": 2, "stop": ["zz"]}).is_success
    (span,) = memory(1)
    assert (span.name, span.kind) == (f"text_completion {MODEL_NAME}", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent is None
    found = dict(attributes(span))
    queued, first, whole = (
        found.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 < queued < first < whole
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(whole, abs=1e-6)
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "loadproof",
        "gen_ai.request.model": MODEL_NAME,
        "gen_ai.request.id": "mine",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stop_sequences": ("zz",),
        "gen_ai.response.model": MODEL_NAME,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "openai.response.system_fingerprint": served.llm.system_fingerprint,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_span_continues_the_callers_trace(served: Running, memory: Spans, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = served.http().post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
    assert answer.is_success
    (span,) = memory(1)
    assert span.name == f"chat {MODEL_NAME}"
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert attributes(span)["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize("header", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 1000, "\u00ff"])
def test_a_broken_parent_is_none(served: Running, memory: Spans, header: str) -> None:
    headers = [(b"traceparent", header.encode())]
    assert served.http().post("/v1/completions", json=BODY, headers=headers).is_success
    (span,) = memory(1)
    assert span.parent is None


def test_a_caller_that_is_not_sampled(served: Running, memory: Spans) -> None:
    http = served.http()
    http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    http.post("/v1/completions", json=BODY)
    (span,) = memory(1)
    assert span.parent is None


def test_scores_have_spans(served: Running, memory: Spans) -> None:
    body = {"context": "hello", "continuations": ["a", "b"]}
    assert served.http().post("/v1/score", json=body).is_success
    (span,) = memory(1)
    assert span.name == f"score {MODEL_NAME}"


def test_nothing_else_has(served: Running, memory: Spans) -> None:
    http = served.http()
    for path in ("/health", "/metrics", "/v1/models", "/v1/completions", "/nowhere"):
        http.get(path)
    assert http.post("/tokenize", json={"prompt": "x"}).is_success
    http.post("/v1/completions", json=BODY)
    memory(1)


def test_refusals_are_no_faults_of_the_servers(served: Running, memory: Spans) -> None:
    assert served.http().post("/v1/completions", json={**BODY, "max_tokens": -1}).status_code == 400
    (span,) = memory(1)
    assert span.status.status_code is StatusCode.UNSET
    found = attributes(span)
    assert found["http.response.status_code"] == 400
    assert not {"gen_ai.usage.input_tokens", "gen_ai.latency.time_in_queue", "error.type"} & found.keys()


def test_a_stream_that_the_client_leaves(served: Running, memory: Spans) -> None:
    body = {**BODY, "max_tokens": 250, "stream": True}
    with served.http().stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    (span,) = memory(1)
    found = attributes(span)
    assert found["gen_ai.usage.input_tokens"] == 3
    assert "gen_ai.latency.time_to_first_token" in found
    assert not {"gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons"} & found.keys()


def test_a_failed_engine(served: Running, memory: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(served.llm.engine, "step", step)
    assert served.http().post("/v1/completions", json=BODY).status_code == 500
    (span,) = memory(1)
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "engine_dead"


def test_seeds_beyond_64_bits_are_text(served: Running, memory: Spans) -> None:
    assert served.http().post("/v1/completions", json={**BODY, "seed": 2**63}).is_success
    (span,) = memory(1)
    assert attributes(span)["gen_ai.request.seed"] == str(2**63)


# Where spans go.


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The URL of something that takes spans, and what it has got: paths and bodies."""
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        finally:
            server.shutdown()
            thread.join()


def export_one(model: Path, endpoint: str) -> None:
    """Make a span, and end the server."""
    with running(model, **ENGINE, otlp_traces_endpoint=endpoint) as served:
        assert served.http().post("/v1/completions", json=BODY).is_success


def test_spans_arrive_at_the_endpoint(tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collector() as (endpoint, got):
        export_one(tiny_chat_model, endpoint)
    ((path, body),) = got
    assert path == "/v1/traces"
    (group,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {one.key: one.value.string_value for one in group.resource.attributes}
    assert resource["service.name"] == "mine"
    assert [span.name for scope in group.scope_spans for span in scope.spans] == [
        f"text_completion {MODEL_NAME}"
    ]


def test_the_end_does_not_wait_for_an_endpoint_that_is_silent(
    tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "_CLOSE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        export_one(tiny_chat_model, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_the_extra_is_missing(reference: LLM, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "loadproof.server.spans")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ServerConfigError, match=r"otlp_traces_endpoint needs .* 'loadproof\[otel\]'"):
        open_tracing(ServerConfig(otlp_traces_endpoint=ENDPOINT), reference)


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "ftp://x/v1", "http://", "http://[::1", "http://x:99999/", "file:///x"]
)
def test_an_endpoint_that_is_no_url(reference: LLM, endpoint: str) -> None:
    with pytest.raises(ServerConfigError, match="otlp_traces_endpoint must be a URL"):
        open_tracing(ServerConfig(otlp_traces_endpoint=endpoint), reference)


def test_no_endpoint_no_spans(reference: LLM) -> None:
    assert open_tracing(ServerConfig(), reference) is None
