"""Clients that go away, deadlines, full queues, slow readers: what they held is free, others never notice."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from tests.server.gate import gate, slowed
from tests.server.joined import joined, meanwhile, stream
from tests.server.running import MODEL_NAME, PATIENCE, MakeServer, Running

from loadproof.engine.output import CompletionDelta
from loadproof.server.stream import Stream

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "x" * 100, "max_tokens": 4000, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def roomy(make_server: MakeServer) -> Running:
    """Requests here take seconds unless they are cut, two run at once, and steps have few tokens."""
    return make_server(max_model_len=8192, max_num_seqs=2, max_num_batched_tokens=64, max_queue=3)


@pytest.fixture
def slow(roomy: Running) -> Iterator[Running]:
    """The same, whose requests take minutes unless they are cut."""
    with slowed(roomy.llm):
        yield roomy


@contextmanager
def asking(server: Running, body: dict[str, Any], path: str = COMPLETIONS) -> Iterator[socket.socket]:
    """A connection on which a request was sent; it is cut at the end."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.socket() as connection:
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(server.address)
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


def read(connection: socket.socket, most: int) -> bytes:
    """What comes next, of so many bytes at most; something must."""
    piece = connection.recv(most)
    assert piece, "the connection ended before its answer"
    return piece


def steps_to_freedom(server: Running, before: int) -> int:
    """How many steps came back since ``before`` until nothing ran and every block was free."""
    stats = server.wait_for(
        lambda stats: (
            not stats["num_running"] + stats["num_waiting"]
            and stats["num_free_blocks"] == stats["num_blocks"]
        )
    )
    return stats["num_steps"] - before


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "extra", [{}, {"n": 2}, {"prompt": ["x" * 100, "y" * 100]}], ids=["1", "n", "prompts"]
)
def test_a_disconnect_while_decoding_frees_all(slow: Running, streamed: bool, extra: dict[str, Any]) -> None:
    begun = slow.llm.stats()["generation_tokens"]
    with asking(slow, {**LONG, **extra, "stream": streamed}):
        slow.wait_for(lambda stats: stats["generation_tokens"] >= begun + 8)
        steps = slow.llm.stats()["num_steps"]
    assert steps_to_freedom(slow, steps) < 2000  # of the 4000 that it would have taken
    assert slow.llm.stats()["generation_tokens"] - begun < 4000


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/score"])
def test_a_disconnect_during_a_prompt_frees_all(slow: Running, path: str) -> None:
    prompt = [5 + i % 200 for i in range(8000)]  # 125 steps, and as many times the wait before each
    body = {"prompt": prompt} if path == COMPLETIONS else {"context": prompt, "continuations": [[5], [6]]}
    finished = slow.llm.stats()["num_finished"]
    with asking(slow, {**body, "cache_salt": f"only here {path}"}, path):
        slow.wait_for(lambda stats: stats["num_running"] > 0)
        steps = slow.llm.stats()["num_steps"]
    assert steps_to_freedom(slow, steps) < 125
    assert slow.llm.stats()["num_finished"] == finished


def test_a_disconnect_in_the_queue_frees_its_place(slow: Running) -> None:
    with asking(slow, {**LONG, "n": 2, "stream": True}):
        slow.wait_for(lambda stats: stats["num_running"] == 2)
        with asking(slow, {**LONG, "stream": True}), asking(slow, LONG):
            slow.wait_for(lambda stats: stats["num_waiting"] == 2)
        stats = slow.wait_for(lambda stats: stats["num_waiting"] == 0)
        assert stats["num_running"] == 2
    slow.check_no_leak()


def test_within_a_step_of_an_abort_its_blocks_are_free(slow: Running) -> None:
    """The step in flight may end, and another be planned before the news come: no more."""
    engine = slow.app.state.server.engine
    with asking(slow, {**LONG, "stream": True}) as connection:
        assert connection.recv(1)
        slow.wait_for(lambda stats: stats["num_running"] == 1)
        streams = list(engine._streams.values())
        told = threading.Event()
        seen: list[int] = []

        def abort() -> None:
            with slow.llm.engine.exclusive():  # no step is made between these two
                seen.append(slow.llm.stats()["num_steps"])
                engine.abort(streams)
            told.set()

        engine._loop.call_soon_threadsafe(abort)
        assert told.wait(PATIENCE)
        assert steps_to_freedom(slow, seen[0]) <= 2


def test_one_clients_cut_does_not_touch_another(roomy: Running) -> None:
    body = {**LONG, "max_tokens": 300, "logprobs": 1}
    http = roomy.http()
    alone = joined(stream(http, COMPLETIONS, body))
    seeds = itertools.count(101)

    def come_and_go() -> None:
        begun, seed = roomy.llm.stats()["num_requests"], next(seeds)
        with asking(roomy, {**LONG, "seed": seed, "stream": bool(seed % 2)}):
            roomy.wait_for(lambda stats: stats["num_requests"] > begun)

    with meanwhile(come_and_go):
        disturbed = joined(stream(http, COMPLETIONS, body))
    assert disturbed == alone
    roomy.check_no_leak()


def check_deadline(answer: httpx.Response) -> None:
    assert answer.status_code == 408
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_deadlines_of_requests_that_wait(slow: Running, streamed: bool) -> None:
    with asking(slow, {**LONG, "n": 2, "stream": True}):
        slow.wait_for(lambda stats: stats["num_running"] == 2)
        answer = slow.http().post(COMPLETIONS, json={**LONG, "stream": streamed, "timeout": 0.05})
        check_deadline(answer)
        assert answer.json()["error"]["message"] == "The request was not finished within its 0.05 seconds."
    slow.check_no_leak()


def test_deadlines_of_requests_that_run(roomy: Running) -> None:
    check_deadline(roomy.http().post(COMPLETIONS, json={**LONG, "timeout": 0.1}))
    body = {**LONG, "stream": True, "timeout": 4}  # its first token comes far sooner
    with gate(roomy.llm, 5), roomy.http().stream("POST", COMPLETIONS, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    roomy.check_no_leak()


def test_the_servers_own_deadline_is_the_longest(make_server: MakeServer) -> None:
    server = make_server(max_model_len=8192, request_timeout=0.1)
    check_deadline(server.http().post(COMPLETIONS, json={**LONG, "timeout": 50}))
    check_deadline(server.http().post(COMPLETIONS, json=LONG))
    server.check_no_leak()


def test_a_full_queue_is_told(slow: Running) -> None:
    http = slow.http()
    with asking(slow, {**LONG, "n": 2, "stream": True}), asking(slow, {**LONG, "n": 3, "stream": True}):
        slow.wait_for(lambda stats: stats["num_running"] + stats["num_waiting"] == 5)
        for streamed in (False, True):
            answer = http.post(COMPLETIONS, json={**LONG, "stream": streamed})
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            message = "5 sequences run or wait, and 1 more are too many: at most 3 may wait."
            assert error["message"] == message
        with pytest.raises(openai.RateLimitError):
            slow.openai().completions.create(model=MODEL_NAME, prompt="a")
        assert http.get("/health").status_code == 200
    slow.check_no_leak()
    assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_more_in_one_request_than_ever_fits(roomy: Running) -> None:
    answer = roomy.http().post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 3})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "6 sequences in one request; at most 5 may run and wait in all."
    assert (error["param"], error["code"]) == ("prompt", "invalid_value")
    error = roomy.http().post(COMPLETIONS, json={"prompt": "a", "n": 6}).json()["error"]
    assert (error["param"], error["code"]) == ("n", "invalid_value")
    error = roomy.http().post("/v1/score", json={"context": "a", "continuations": ["b"] * 6}).json()["error"]
    assert (error["param"], error["code"]) == ("continuations", "invalid_value")


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "several"])
def test_a_reader_that_does_not_read_is_cut_off(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    """Pieces are large (all log-probabilities), so that the sockets' own buffers are full soon."""
    server = make_server(max_model_len=4200, max_logprobs=-1, max_stream_backlog=20, check_integrity=False)
    push, waiting = Stream.push, []

    def pushing(stream: Stream, delta: CompletionDelta) -> None:
        push(stream, delta)
        waiting.append(len(stream._deltas))

    monkeypatch.setattr(Stream, "push", pushing)
    body = {**LONG, "prompt": prompt, "logprobs": 280, "stream": True}
    aborted = server.llm.stats()["num_aborted"]
    with asking(server, body) as connection:
        server.wait_for(lambda stats: stats["num_aborted"] > aborted)
        server.check_no_leak()
        assert max(waiting) == 21
        received = bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += read(connection, 1 << 20)
    assert b'"code":"reader_too_slow"' in received
    assert b"[DONE]" not in received


def test_a_slow_reader_within_the_bound_gets_all(make_server: MakeServer) -> None:
    server = make_server(max_model_len=512)
    with asking(server, {**LONG, "max_tokens": 300, "stream": True}) as connection:
        server.wait_for(lambda stats: stats["num_finished"] == 1)
        received = bytearray()
        while b"[DONE]" not in received:
            received += read(connection, 1000)
    assert received.count(b"data: ") == 301
