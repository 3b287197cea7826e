"""Whole answers that nobody reads: their connections don't stay, and what is read in time arrives whole."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from tests.server.running import MakeServer, Running
from tests.server.test_cancel import asking, read

from loadproof.server.connection import Connection

BODY: dict[str, Any] = {
    "prompt": [5 + i % 200 for i in range(240)],
    "prompt_logprobs": 20,
    "n": 16,
    "max_tokens": 1,
    "seed": 1,
}


@pytest.fixture(scope="module")
def server(make_server: MakeServer) -> Running:
    """A server of its own, to count its connections."""
    return make_server()


def received(connection: socket.socket) -> tuple[int, bytes]:
    """The length that was said, and what came of it until the connection closed or all was there."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        data += read(connection, 4096)
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    content = bytearray(body)
    try:
        while len(content) < length and (part := connection.recv(1 << 16)):
            content += part
    except ConnectionResetError:
        pass
    return length, bytes(content)


def num_connections(server: Running) -> int:
    return len(server.uvicorn.server_state.connections)


def is_held_up(server: Running) -> bool:
    """Whether an answer waits for its reader."""
    return any(connection._patience for connection in list(server.uvicorn.server_state.connections))  # type: ignore[union-attr]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_nobody_reads_is_given_up(
    server: Running, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(Connection, "write_timeout", 0.1)
    begun = server.llm.stats()["num_requests"]
    with asking(server, {**BODY, "stream": streamed}) as connection:
        server.wait_for(lambda stats: stats["num_requests"] > begun)
        server.wait_for(lambda _: num_connections(server) == 0)
        if not streamed:
            length, content = received(connection)
            assert len(content) < length
    server.check_no_leak()


def test_an_answer_that_is_read_after_a_while_is_whole(server: Running) -> None:
    finished = server.llm.stats()["num_finished"]
    with asking(server, BODY) as connection:
        server.wait_for(lambda stats: stats["num_finished"] == finished + 1)
        server.wait_for(lambda _: is_held_up(server))
        length, content = received(connection)
    assert len(content) == length
    assert len(json.loads(content)["choices"]) == 16


def test_a_reader_that_takes_some_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the buffer's size at each look: as long as it falls the connection stays."""
    sizes = iter([60_000, 20_000, 19_000])
    looks: list[tuple[Any, ...]] = []

    class Transport:
        aborted = False

        def get_write_buffer_size(self) -> int:
            return next(sizes)

        def abort(self) -> None:
            self.aborted = True

    class Loop:
        def call_later(self, _: float, *call: Any) -> None:
            looks.append(call)

    connection, transport = object.__new__(Connection), Transport()
    monkeypatch.setattr(connection, "transport", transport, raising=False)
    monkeypatch.setattr(connection, "loop", Loop(), raising=False)
    connection._wait_for_reader(100_000)
    for given_up in (False, False, True):
        look, *args = looks.pop()
        look(*args)
        assert transport.aborted is given_up
    assert not looks
