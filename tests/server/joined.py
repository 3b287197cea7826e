"""Streamed answers joined again, to be compared with whole ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tests.server.running import PATIENCE

CHOICE_LISTS = ("token_ids",)
LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs", "content")


def events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The chunks of a stream of events, which ends as OpenAI's do."""
    found = [line for line in lines if line]
    assert all(line.startswith("data: ") for line in found), found
    assert found[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in found[:-1]]


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks that a request for a stream gets."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(answer.iter_lines())


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of all chunks, each joined, in their order; texts of chats under ``text`` as well."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            _add(choices.setdefault(piece["index"], {"text": "", "finish_reason": None}), piece, chunk)
    assert sorted(choices) == list(range(len(choices)))
    return [choices[index] for index in sorted(choices)]


def _add(choice: dict[str, Any], piece: dict[str, Any], chunk: dict[str, Any]) -> None:
    assert choice["finish_reason"] is None, "a piece after the end"
    choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content", "")
    choice["finish_reason"] = piece["finish_reason"]
    for name in CHOICE_LISTS:
        if name in piece:
            choice[name] = choice.get(name, []) + piece[name]
    for name in ("seed", "stop_reason", "prompt_token_ids", "prompt_logprobs"):
        value = piece.get(name, chunk.get(name))
        if value is not None:
            assert name not in choice, f"{name} twice"
            choice[name] = value
    if piece["logprobs"] is not None:
        lists = choice.setdefault("logprobs", {name: [] for name in piece["logprobs"]})
        for name in lists:
            assert name in LISTS
            lists[name] += piece["logprobs"][name]


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole answer in the shape of :func:`joined`: what is null is left out."""
    made = {name: value for name, value in choice.items() if value is not None and name != "index"}
    if "message" in made:
        made["text"] = made.pop("message")["content"]
    return made


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Have another thread do something over and over, once before the block; it ends between two times."""
    done, acted = threading.Event(), threading.Event()

    def repeat() -> None:
        while not done.is_set():
            act()
            acted.set()

    other = threading.Thread(target=repeat)
    other.start()
    try:
        assert acted.wait(PATIENCE)
        yield
    finally:
        done.set()
        other.join()
