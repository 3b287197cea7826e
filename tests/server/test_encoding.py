"""Encoding: nothing that can't fit, in few threads, within the deadline, and only while somebody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.server.running import PATIENCE, MakeServer, Running
from tests.server.test_cancel import asking, check_deadline

from loadproof.server.deadline import Deadline
from loadproof.server.encoder import MOST_SHORT, Encoder
from loadproof.server.errors import ApiError
from loadproof.tokenizer.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
MOST = 64 * 256
HI = [{"role": "user", "content": "Hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a"}),
    (COMPLETIONS, {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/score", {"context": "a", "continuations": ["b"]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths in bytes of all texts that are encoded from now on."""
    lengths: list[int] = []
    encode = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Any, *args: Any, **options: Any) -> Any:
        lengths.extend(len(text.encode()) for text in texts)
        return encode(self, texts, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    return lengths


LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x" * (MOST + 1)}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "é" * (MOST // 2 + 1)], "stream": True}, "prompt[1]"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * MOST}]}, "messages"),
    ("/v1/score", {"context": "x" * MOST, "continuations": ["", "y"]}, "continuations[1]"),
    ("/v1/score", {"context": "x" * (MOST + 1), "continuations": [[5]]}, "context"),
    (
        "/v1/score",
        {"context": "x" * MOST, "continuations": ["y"], "truncate_context": True},
        "continuations[0]",
    ),
    ("/tokenize", {"prompt": "x" * (MOST + 1)}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * MOST}]}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), LONG, ids=lambda value: str(value)[:30])
def test_what_cannot_fit_is_not_encoded(
    http: httpx.Client, encoded: list[int], path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"at most {MOST} are encoded" in error["message"]
    assert max(encoded, default=0) < MOST


def test_the_longest_text_that_is_encoded(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "x" * MOST}).json()["count"] >= MOST
    answer = http.post(COMPLETIONS, json={"prompt": "x" * MOST})
    assert "the prompt has" in answer.json()["error"]["message"]


@pytest.mark.parametrize("part", ["y", [5]], ids=["text", "ids"])
def test_a_context_repeated_too_often(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, encoded: list[int], part: Any
) -> None:
    monkeypatch.setattr("loadproof.server.bounds.MOST_SCORED_BYTES", 800)
    monkeypatch.setattr("loadproof.server.bounds.MOST_SCORED_IDS", 800)
    context = "x" * 99 if isinstance(part, str) else [5] * 99
    body = {"context": context, "continuations": [part] * 8}
    assert http.post("/v1/score", json=body).status_code == 200
    encoded.clear()
    answer = http.post("/v1/score", json={**body, "continuations": [part] * 9})
    assert answer.status_code == 400
    assert "come to 900 " in answer.json()["error"]["message"]
    assert not encoded


def test_more_ids_than_the_model_takes_are_not_decoded(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [5] * 256}).status_code == 200
    answer = http.post("/detokenize", json={"tokens": [5] * 257})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")
    assert error["message"] == "tokens has 257 entries; max_model_len is 256"


@pytest.fixture(scope="module")
def held_server(make_server: MakeServer) -> Running:
    """A server of its own: its encoder stands still in these tests."""
    return make_server(max_num_seqs=2, max_queue=1)


@contextmanager
def holding(server: Running) -> Iterator[None]:
    """Keep all threads of its encoder busy."""
    go_on = threading.Event()
    encoder = server.app.state.server.encoder
    pools = (encoder._for_long, encoder._for_long, encoder._for_short)
    works = [pool.submit(go_on.wait, PATIENCE) for pool in pools]
    try:
        yield
    finally:
        go_on.set()
        for work in works:
            work.result()
    server.check_no_leak()


@pytest.fixture
def held(held_server: Running) -> Iterator[Running]:
    """The server while all threads of its encoder are busy."""
    with holding(held_server):
        yield held_server


def wait_until(condition: Callable[[], bool], server: Running) -> None:
    server.wait_for(lambda _: condition())


@pytest.mark.parametrize(("path", "body"), CALLS[:4], ids=lambda value: ",".join(value))
def test_the_deadline_counts_from_the_start(held: Running, path: str, body: dict[str, Any]) -> None:
    check_deadline(held.http().post(path, json={**body, "timeout": 0.05}))
    assert held.app.state.server.encoder.num_unfinished == 0


@pytest.mark.parametrize(("path", "body"), CALLS, ids=lambda value: ",".join(value))
def test_nothing_is_encoded_for_a_client_that_has_gone(
    held_server: Running, encoded: list[int], path: str, body: dict[str, Any]
) -> None:
    encoder = held_server.app.state.server.encoder
    with holding(held_server):
        with asking(held_server, body, path):
            wait_until(lambda: encoder.num_unfinished == 1, held_server)
        wait_until(lambda: encoder.num_unfinished == 0, held_server)
    assert not encoded  # nor once there is time for it


@pytest.mark.parametrize(("path", "body"), CALLS, ids=lambda value: ",".join(value))
def test_long_texts_hold_up_no_short_ones(make_server: MakeServer, path: str, body: dict[str, Any]) -> None:
    served, go_on, begun = make_server(), threading.Event(), threading.Semaphore(0)
    encoder = served.app.state.server.encoder

    def work() -> None:
        begun.release()
        go_on.wait(PATIENCE)

    async def long() -> None:
        await asyncio.gather(*(encoder.run(None, MOST_SHORT + 1, work) for _ in range(9)))

    thread = threading.Thread(target=lambda: asyncio.run(long()))
    thread.start()
    try:
        for _ in range(2):
            assert begun.acquire(timeout=PATIENCE)
        wait_until(lambda: encoder.num_unfinished == 9, served)
        extra = {"max_tokens": 1} if path.endswith("completions") else {}
        assert served.http().post(path, json={**body, **extra}).status_code == 200
        assert encoder.num_unfinished == 9
    finally:
        go_on.set()
        thread.join()


LONG_WORK: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["x" * 999] * 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (MOST_SHORT + 1)}]}),
    ("/v1/score", {"context": "x" * 999, "continuations": ["y"] * 20}),
    ("/tokenize", {"prompt": " x" * MOST_SHORT}),
]


@pytest.mark.parametrize(("path", "body"), LONG_WORK, ids=lambda value: str(value)[:30])
def test_the_whole_of_a_request_makes_it_long(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    sizes: list[int] = []
    run = Encoder.run

    async def noting(self: Encoder, deadline: Any, size: int, *args: Any, **options: Any) -> Any:
        sizes.append(size)
        return await run(self, deadline, size, *args, **options)

    monkeypatch.setattr(Encoder, "run", noting)
    http.post(path, json=body)
    (size,) = sizes
    assert size > MOST_SHORT


def test_so_many_may_wait(held: Running) -> None:
    encoder = held.app.state.server.encoder
    body = {"prompt": "a", "max_tokens": 1}
    with asking(held, body), asking(held, body), asking(held, body), asking(held, body), asking(held, body):
        wait_until(lambda: encoder.num_unfinished == 5, held)
        for path, other in CALLS:
            answer = held.http().post(path, json=other)
            assert answer.status_code == 429, (path, answer.text)
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"
            message = "5 texts are being encoded or wait for that: no more may."
            assert answer.json()["error"]["message"] == message
        assert held.http().get("/health").status_code == 200


def test_what_has_begun_ends_by_itself() -> None:
    async def leave() -> None:
        encoder, begun, go_on = Encoder(0, 1), threading.Event(), threading.Event()

        def work() -> str:
            begun.set()
            go_on.wait(PATIENCE)
            return "done"

        task = asyncio.create_task(encoder.run(None, MOST_SHORT + 1, work))
        await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        await asyncio.wait([task])
        assert encoder.num_unfinished == 1
        with pytest.raises(ApiError) as caught:
            await encoder.run(None, 0, work)
        assert caught.value.status == 429
        go_on.set()
        while encoder.num_unfinished:
            await asyncio.sleep(0.001)
        assert await encoder.run(None, 0, work) == "done"

    asyncio.run(leave())


def test_errors_of_the_work_are_its_callers() -> None:
    async def fail() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            await Encoder(1).run(Deadline.of(PATIENCE), 0, int, "x")

    asyncio.run(fail())
