"""The access log: a line for each request; and the ids that requests have."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Scope
from tests.server.running import MODEL_NAME, PATIENCE, MakeServer, Running

from loadproof.server import access
from loadproof.server.request_record import RequestRecord

Accesses = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def accesses(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Accesses:
    """The fields of the access log's lines, once there are so many; clients may have their answers before.

    So lines of requests that other tests made may come now: only those count that begin from here on.
    """
    caplog.set_level(logging.DEBUG, "loadproof.access")
    begun: set[tuple[str, str]] = set()
    record_of = access._record_of

    def noted(scope: Scope) -> RequestRecord:
        record = record_of(scope)
        begun.add((record.client, record.request_id))
        return record

    monkeypatch.setattr(access, "_record_of", noted)

    def fields_of(record: logging.LogRecord) -> dict[str, Any]:
        return {**vars(record)["loadproof_fields"], "level": record.levelname}

    def read(count: int) -> list[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        while True:
            lines = [fields_of(record) for record in caplog.records if record.name == "loadproof.access"]
            lines = [line for line in lines if (line["client"], line["request_id"]) in begun]
            if len(lines) >= count or time.monotonic() > end:
                break
            time.sleep(0.002)
        assert len(lines) == count
        return lines

    return read


def ask_raw(served: Running, head: bytes) -> bytes:
    with socket.create_connection(served.address, timeout=PATIENCE) as connection:
        connection.sendall(head + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_hostile_path(server: Running, accesses: Accesses) -> None:
    target = b"/a%0a2026%20INFO%e2%80%a8%ff%1b[2J" + b"x" * 2000 + b"?key=secret"
    assert ask_raw(server, b"GET " + target + b" HTTP/1.1").startswith(b"HTTP/1.1 404")
    (line,) = accesses(1)
    assert line["path"].startswith("/a%0A2026%20INFO%E2%80%A8")
    assert line["path"].isascii()
    assert line["path"].isprintable()
    assert len(line["path"]) < 3 * 512
    assert "secret" not in str(line)


def test_a_generations_line(server: Running, accesses: Accesses) -> None:
    http = server.http()
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "n": 2}
    http.post("/v1/completions?key=x", json=body)
    with http.stream("POST", "/v1/completions", json={**body, "stream": True, "n": 1}) as answer:
        answer.read()
    whole, streamed = accesses(2)
    for line, num_tokens in ((whole, 8), (streamed, 4)):
        assert (line["level"], line["method"], line["path"]) == ("INFO", "POST", "/v1/completions")
        assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (200, 3, num_tokens)
        assert line["client"].startswith("127.0.0.1:")
        assert line["seconds"] > 0
        assert not {"cut_off", "error"} & line.keys()


def test_a_stream_that_the_client_leaves(server: Running, accesses: Accesses, no_leak: None) -> None:
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with server.http().stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    (line,) = accesses(1)
    assert (line["status"], line["cut_off"], line["prompt_tokens"]) == (200, True, 1)
    assert "completion_tokens" not in line


def test_a_stream_that_the_server_cuts_off(
    make_server: MakeServer, accesses: Accesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_server()
    step, steps = served.llm.engine.step, iter(range(1000))

    def failing() -> None:
        if next(steps) > 5:
            raise RuntimeError("broken")
        step()

    monkeypatch.setattr(served.llm.engine, "step", failing)
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with served.http().stream("POST", "/v1/completions", json=body) as answer:
        assert b"engine_dead" in answer.read()
    (line,) = accesses(1)
    assert (line["status"], line["error"]) == (200, "engine_dead")


def test_refusals_have_lines(server: Running, accesses: Accesses) -> None:
    http = server.http()
    http.get("/nowhere")
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
    http.get("/version", headers={"host": "example.org"})
    assert [line["status"] for line in accesses(3)] == [404, 400, 403]


def test_machines_that_look_after_the_server_are_quiet(server: Running, accesses: Accesses) -> None:
    for path in ("/health", "/metrics", "/version"):
        server.http().get(path)
    server.http().post("/health")
    assert [(line["path"], line["level"]) for line in accesses(4)] == [
        ("/health", "DEBUG"),
        ("/metrics", "DEBUG"),
        ("/version", "INFO"),
        ("/health", "INFO"),
    ]


def test_without_an_access_log(make_server: MakeServer, accesses: Accesses) -> None:
    http = make_server(access_log=False).http()
    for _ in range(2):  # with the second answer the first request is over
        assert http.get("/version").headers["x-request-id"]
    assert accesses(0) == []


# Request ids.


@pytest.mark.parametrize("given_id", ["a", "trace-1/2:3", "with space", "x" * 128, "~!\"'"])
def test_a_sane_request_id_is_kept(given_id: str, http: httpx.Client, accesses: Accesses) -> None:
    answer = http.get("/version", headers={"x-request-id": given_id})
    assert answer.headers["x-request-id"] == given_id
    assert [line["request_id"] for line in accesses(1)] == [given_id]


@pytest.mark.parametrize("given_id", [b"", b"x" * 129, b"a\tb", "\u00e9".encode(), b"\xff", b"a\x7fb"])
def test_any_other_is_replaced(given_id: bytes, http: httpx.Client) -> None:
    headers = [(b"x-request-id", given_id)]
    made = {http.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for one in made:
        assert len(one) == 32
        int(one, 16)


def test_errors_are_named_too(make_server: MakeServer, http: httpx.Client) -> None:
    served = make_server(api_keys=("secret",))
    mine = {"x-request-id": "mine"}
    assert served.http().get("/version", headers=mine).headers["x-request-id"] == "mine"
    assert http.get("/nowhere", headers=mine).headers["x-request-id"] == "mine"


def test_an_answer_to_a_fault_of_the_servers(
    make_server: MakeServer,
    accesses: Accesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = make_server()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("loadproof.server.routes.models._card", broken)
    answer = served.http().get("/v1/models", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "a bug" not in answer.text
    (line,) = accesses(1)
    assert (line["status"], line["error"], line["request_id"]) == (500, "500", "mine")


def test_openais_client_reads_the_id(server: Running) -> None:
    completion = server.openai(default_headers={"x-request-id": "mine"}).completions.create(
        model=MODEL_NAME, prompt="x", max_tokens=1
    )
    assert completion._request_id == "mine"
