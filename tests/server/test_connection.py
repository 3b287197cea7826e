"""Connections that send half a request, too much, or no HTTP at all."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse

import pytest
from tests.server.running import PATIENCE
from tests.server.served_process import ENDLESS, ServerProcess, served, write_long_model

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that waits a short time for requests, and takes small ones; its log says nothing bad."""
    model = str(write_long_model(tmp_path_factory.mktemp("connection") / "tiny"))
    limits = ("--read-timeout", "1", "--max-header-size", "4KiB", "--max-body-size", "64KiB")
    with served(model, "--num-threads", "1", "--kv-cache-memory", "64MiB", *limits) as process:
        yield process
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "Traceback" not in process.log
        assert "upgrade" not in process.log.lower()


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def answered(connection: socket.socket) -> tuple[int, str | None]:
    """Status and type of the next answer, once all of it has come, in however many pieces."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status, answer.getheader("content-type")


def answer_to(server: ServerProcess, request: bytes) -> tuple[int, str]:
    """Status and error code of the answer to bytes that end a connection."""
    with server.connect() as connection:
        connection.sendall(request)
        head, _, body = everything(connection).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"G",
        HEALTH[:-2],
        HEAD,
        HEAD + b"content-length: 1000\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{    \r\n",
        HEALTH + HEALTH[:20],
    ],
)
def test_half_a_request_is_not_waited_for(server: ServerProcess, half: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(half)
        answers = everything(connection)
    assert answers.count(b"HTTP/1.1 200") == half.count(HEALTH)


def test_a_request_that_drips_is_not_waited_for(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.settimeout(0.1)
        connection.sendall(HEAD + b"x-drip: ")
        assert any(_hangs_up(connection) for _ in range(int(PATIENCE / 0.1)))


def _hangs_up(connection: socket.socket) -> bool:
    """Whether the server does so after one more byte."""
    try:
        connection.sendall(b"a")
        return not connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_many_half_requests_leave_room_for_whole_ones(server: ServerProcess) -> None:
    connections = [server.connect() for _ in range(100)]
    try:
        for connection in connections:
            connection.sendall(HEAD)
        with server.client() as client:
            assert client.get("/health").status_code == 200
    finally:
        for connection in connections:
            connection.close()


def test_an_answer_may_take_longer_than_a_request(server: ServerProcess) -> None:
    started = time.monotonic()
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        while time.monotonic() < started + 2:
            assert next(line for line in lines if line).startswith("data: {")


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"NONSENSE\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: many\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400, "invalid_http"),
        (
            HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH,
            400,
            "invalid_http",
        ),
        (
            HEALTH[:-2].replace(b"/health", b"http://elsewhere/version") + b"connection: close\r\n\r\n",
            403,
            "wrong_host",
        ),
        (HEAD + b"x-large: " + b"a" * 8192, 431, "headers_too_large"),
        (b"GET /" + b"a" * 8192, 431, "headers_too_large"),
        # Whole at once, in one read.
        (HEALTH[:-2] + b"x-large: " + b"a" * 8192 + b"\r\n\r\n", 431, "headers_too_large"),
        (HEALTH[:-2] + b"x: a\r\n" * 800 + b"\r\n", 431, "headers_too_large"),
        (HEALTH.replace(b"health", b"health?" + b"a" * 8192), 431, "headers_too_large"),
        (HEAD + b"x-large: " + b"a" * 8192 + b"\r\ncontent-length: 2\r\n\r\n{}", 431, "headers_too_large"),
    ],
)
def test_what_is_no_http_is_told_so(server: ServerProcess, request_: bytes, status: int, code: str) -> None:
    assert answer_to(server, request_) == (status, code)


@pytest.mark.parametrize("target", [b"http://localhost/health", b"HTTP://127.0.0.1:80/health?a=http://b/"])
def test_a_url_is_served_as_its_path(server: ServerProcess, target: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(HEALTH.replace(b"/health", target).replace(b"host: localhost", b"host: elsewhere"))
        assert answered(connection)[0] == 200


def test_a_url_without_a_path_is_that_of_the_root(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.sendall(HEALTH.replace(b"/health", b"http://localhost?a=b"))
        assert answered(connection) == (200, "text/html; charset=utf-8")


def test_headers_just_within_the_limit_are_taken(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.sendall(HEALTH[:-2] + b"x-large: " + b"a" * 3900 + b"\r\n\r\n")
        assert answered(connection)[0] == 200


def test_nonsense_after_an_answer_that_came_early_closes_the_connection(server: ServerProcess) -> None:
    """The body is refused by its length; what comes instead of its end can't be answered again."""
    body = (b"1000\r\n" + b" " * 4096 + b"\r\n") * 20
    with server.connect() as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + body)
        assert answered(connection)[0] == 413
        with suppress(ConnectionError):  # closed already: the whole took more than the server's second
            connection.sendall(b"nonsense\r\n")
            assert b"HTTP/1.1" not in everything(connection)


@pytest.mark.parametrize(
    ("path", "num_chunks"), [(b"/health", 0), (b"/health", 2), *((b"/v1/completions", i) for i in (0, 2, 20))]
)
def test_nonsense_that_came_with_its_request_is_all_that_is_answered(
    server: ServerProcess, path: bytes, num_chunks: int
) -> None:
    head = HEAD.replace(b"/v1/completions", path) + b"transfer-encoding: chunked\r\n\r\n"
    body = (b"1000\r\n" + b" " * 4096 + b"\r\n") * num_chunks
    assert answer_to(server, head + body + b"nonsense\r\n") == (400, "invalid_http")


def test_a_body_that_is_refused_may_be_sent_to_its_end(server: ServerProcess) -> None:
    body = b" " * (1 << 20)
    with server.connect() as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert answered(connection)[0] == 413
        connection.sendall(HEALTH)
        assert answered(connection)[0] == 200


def test_an_offer_to_upgrade_is_answered_without(server: ServerProcess) -> None:
    for protocol in ("h2c", "websocket"):
        with server.client() as client:
            headers = {"connection": "upgrade", "upgrade": protocol}
            assert client.get("/health", headers=headers).status_code == 200
