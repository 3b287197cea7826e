"""A server's start and end, with processes, signals and devices that fail."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.server.running import PATIENCE
from tests.server.served_process import ENDLESS, ServerProcess, served, write_long_model

from loadproof import LLM, SamplingParams
from loadproof.devices.device import StepBatch, SubmittedStep
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.server.async_engine import Ask, AsyncEngine
from loadproof.server.serve import serve
from loadproof.server.settings import ServerConfig
from loadproof.server.sockets import AddressError, bound_sockets, close_all

SMALL = ("--num-threads", "1", "--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_long_model(tmp_path_factory.mktemp("life") / "tiny"))


@contextmanager
def streaming(server: ServerProcess, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The events of a stream that has begun."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert json.loads(next(events))["choices"]
        yield events


def last_error(events: Iterator[str]) -> dict[str, Any]:
    """The error that a stream ends with."""
    error: dict[str, Any] = json.loads(list(events)[-1])["error"]
    return error


def get(server: ServerProcess, path: str) -> int:
    return httpx.get(server.url + path).status_code


def check_quiet(server: ServerProcess) -> None:
    """Nothing went wrong: no traceback, no error."""
    assert server.stderr == []
    assert [event for event in server.events if event["level"] in ("error", "critical")] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_an_idle_server_with_its_connections(
    model: str, number: signal.Signals, code: int
) -> None:
    with served(model, *SMALL) as server, server.client() as client, server.connect() as silent:
        assert client.get("/health").json() == {"status": "ok"}  # and its connection is kept
        server.signal(number)
        assert server.wait() == code
        check_quiet(server)
        assert silent.recv(1) == b""


def test_the_log_says_what_is_served(model: str) -> None:
    with served(model, *SMALL, "--max-model-len", "4096", "--served-model-name", "m") as server:
        url = server.url
        by_field = {name: event[name] for event in server.events for name in event}
        with server.client() as client:
            card = client.get("/v1/models").json()["data"][0]
        server.signal(signal.SIGTERM)
        server.wait()
    assert by_field["fingerprint"] == card["system_fingerprint"]
    assert (by_field["format"], by_field["threads"]) == ("bf16", 1)
    assert by_field["isa"]
    assert (by_field["max_model_len"], by_field["block_size"], by_field["max_num_seqs"]) == (4096, 32, 64)
    assert by_field["kv_blocks"] > 0
    assert url == f"http://127.0.0.1:{by_field['port']}"
    assert any("serves m" in event["message"] for event in server.events)


def test_requests_in_flight_finish_after_sigterm_and_new_ones_are_refused(model: str) -> None:
    body = {**ENDLESS, "max_tokens": 200}
    with served(model, *SMALL, fault=("slow", 1)) as server, streaming(server, body) as events:
        server.signal(signal.SIGTERM)
        while get(server, "/health") != 503:
            pass
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        rest = list(events)
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        check_quiet(server)


def test_what_has_not_finished_in_time_is_cut_off_with_an_error(model: str) -> None:
    with (
        served(model, *SMALL, "--shutdown-timeout", "0.2") as server,
        streaming(server, ENDLESS) as events,
    ):
        server.signal(signal.SIGTERM)
        assert last_error(events)["code"] == "unavailable"
        assert server.wait() == 0
        check_quiet(server)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_cuts_off_at_once(model: str, number: signal.Signals, code: int) -> None:
    with (
        served(model, *SMALL, "--shutdown-timeout", "3000") as server,
        streaming(server, ENDLESS) as events,
    ):
        server.signal(number)
        while get(server, "/health") != 503:
            pass
        server.signal(number)
        assert last_error(events)["code"] == "unavailable"
        assert server.wait() == code
        check_quiet(server)


def test_a_client_that_never_reads_does_not_hold_the_end(model: str) -> None:
    # Tens of kilobytes a step: soon more than the sockets' buffers hold.
    body = json.dumps({**ENDLESS, "max_tokens": 5000, "n": 16, "logprobs": 20, "stream": True}).encode()
    with (
        served(model, *SMALL, "--shutdown-timeout", "0.2", "--max-stream-backlog", "16777216") as server,
        server.connect() as deaf,
    ):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        deaf.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        with server.client() as client:
            while _generated(client) < 8000:
                pass
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        check_quiet(server)


def _generated(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    found = [line.split()[-1] for line in lines if line.startswith("loadproof:generation_tokens_total{")]
    return float(found[0])


def test_an_engine_that_dies_fails_every_request_and_its_health(model: str) -> None:
    with served(model, *SMALL, fault=("fail", 100)) as server:
        with streaming(server, ENDLESS) as events:
            assert last_error(events)["code"] == "engine_dead"
        later = httpx.post(f"{server.url}/v1/completions", json=ENDLESS)
        assert (later.status_code, later.json()["error"]["code"]) == (500, "engine_dead")
        assert get(server, "/health") == 503
        assert get(server, "/v1/models") == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert "the device failed" in server.log


def test_a_request_that_is_not_streamed_fails_with_its_engine(model: str) -> None:
    with served(model, *SMALL, fault=("fail", 50)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=ENDLESS)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_frozen_engine_is_unhealthy_while_the_server_answers(model: str) -> None:
    with (
        served(model, *SMALL, "--health-timeout", "0.2", fault=("freeze", 100)) as server,
        streaming(server, ENDLESS),
    ):
        while get(server, "/health") != 503:
            pass
        assert get(server, "/version") == 200
        server.signal(signal.SIGTERM)
        server.wait_for_log("shutting down")
        server.signal(signal.SIGTERM)
        server.wait_for_log("a second SIGTERM")
        server.signal(signal.SIGTERM)  # which ends what hangs
        assert server.wait() == 143


def test_a_third_signal_ends_a_server_whose_event_loop_hangs(model: str) -> None:
    with served(model, *SMALL, fault=("hang", 1)) as server:
        assert get(server, "/health") == 200
        server.signal(signal.SIGTERM)
        server.wait_for_log("the event loop hangs")
        end = time.monotonic() + PATIENCE
        while server.process.poll() is None and time.monotonic() < end:
            server.signal(signal.SIGTERM)
            time.sleep(0.05)  # two that come at once count as one
        assert server.wait() == 143


def test_a_hangup_lets_requests_finish(model: str) -> None:
    body = {**ENDLESS, "max_tokens": 200}
    with served(model, *SMALL, fault=("slow", 1)) as server, streaming(server, body) as events:
        server.signal(signal.SIGHUP)
        assert list(events)[-1] == "[DONE]"
        assert server.wait() == 0
        check_quiet(server)


def test_a_hangup_that_is_ignored_stays_so(model: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it to its program
    try:
        with served(model, *SMALL) as server:
            assert get(server, "/health") == 200
            server.signal(signal.SIGHUP)
            assert get(server, "/health") == 200
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            check_quiet(server)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_that_does_not_end_is_left_behind(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, thaw = threading.Event(), threading.Event()
    with LLM(model, num_threads=1, kv_cache_memory=64 << 20) as llm:
        submit = llm.engine.device.submit

        def freezing(batch: StepBatch) -> SubmittedStep:
            frozen.set()
            thaw.wait(PATIENCE)
            return submit(batch)

        monkeypatch.setattr(llm.engine.device, "submit", freezing)

        async def life() -> AsyncEngine:
            engine = AsyncEngine(llm.engine)
            engine.start()
            engine.submit([Ask(prompt=TokenizedPrompt([1], ""), params=SamplingParams(max_tokens=1))])
            await asyncio.to_thread(frozen.wait, PATIENCE)
            await engine.drain(0.0)
            await engine.stop(0.01)
            return engine

        engine = asyncio.run(life())
        assert isinstance(engine.failure, TimeoutError)
        assert not llm.engine.closed
        thaw.set()


def test_an_address_in_use_is_one_line_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served("no-such-model", "--port", str(port)) as server:
            assert server.wait() == 1
            assert server.stderr == [
                f"loadproof: port {port} of 127.0.0.1 is in use; choose another with --port"
            ]


def test_a_port_that_another_server_takes_meanwhile_closes_the_model(model: str) -> None:
    llm = LLM(model, num_threads=1, kv_cache_memory=64 << 20)
    first = bound_sockets("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    second = bound_sockets("127.0.0.1", port)  # neither listens yet
    first[0].listen()
    try:
        with pytest.raises(AddressError, match=f"port {port} of 127.0.0.1 is in use"):
            serve(llm, ServerConfig(port=port), second)
        assert llm.engine.closed
    finally:
        close_all([*first, *second])


def test_a_model_that_cannot_be_loaded_is_one_line() -> None:
    with served("/no/such/model") as server:
        assert server.wait() == 1
        assert server.stderr
        assert server.stderr[-1].startswith("loadproof: ")
        assert "Traceback" not in server.log
