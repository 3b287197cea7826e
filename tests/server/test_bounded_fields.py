"""Every list and object that a request may hold has a bound, and no fault beyond the first is looked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadproof.server.schemas import chat, completions, scoring, tokens
from loadproof.server.schemas.at_most import AtMost
from loadproof.server.schemas.base import RequestModel

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HI}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MANY = 100_000


def requests(kind: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    """All bodies and parts of bodies that the server knows."""
    for each in kind.__subclasses__():
        yield each
        yield from requests(each)


def unbounded(schema: Any, counted: bool = False) -> Iterator[str]:
    """The lists and objects in a schema that have no bound, or find faults without end."""
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from unbounded(part)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    fine = "max_length" in schema and (schema.get("fail_fast") or counted)
    if kind in ("list", "dict", "set", "frozenset", "tuple", "generator") and not fine:
        yield str(schema)[:200]
    function = schema.get("function", {}) if kind == "function-before" else {}
    owner = getattr(function.get("function"), "__self__", None)
    for name, part in schema.items():
        if name != "serialization":  # how a body is written: it was read and bounded before that
            yield from unbounded(part, isinstance(owner, AtMost))


@pytest.mark.parametrize("kind", sorted(set(requests()), key=str))
def test_every_list_and_object_is_bounded(kind: type[RequestModel]) -> None:
    assert not list(unbounded(kind.__pydantic_core_schema__))


def test_all_requests_are_looked_at() -> None:
    known = {chat.ChatRequest, completions.CompletionRequest, scoring.ScoreRequest, tokens.TokenizeRequest}
    assert known <= set(requests())


def test_what_has_no_bound_is_seen() -> None:
    class Loose(RequestModel):
        parts: list[dict[str, int]]

    assert len(list(unbounded(Loose.__pydantic_core_schema__))) == 2


def one(**fields: Any) -> list[dict[str, Any]]:
    """A chat of one message of an assistant."""
    return [{"role": "assistant", "content": "a", **fields}]


def calls(count: int) -> list[dict[str, Any]]:
    return [{"function": {"name": "f", "arguments": "{}"}}] * count


def members(count: int) -> dict[str, int]:
    return {str(place): 5 for place in range(count)}


LARGE: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, {**CHAT, "tools": [{}] * MANY}, "tools"),
    (CHATS, {**CHAT, "functions": [{}] * MANY}, "functions"),
    (CHATS, {**CHAT, "tools": [members(MANY)]}, "tools[0]"),
    (CHATS, {**CHAT, "tool_choice": members(MANY)}, "tool_choice"),
    (CHATS, {**CHAT, "response_format": members(MANY)}, "response_format"),
    (CHATS, {**CHAT, "chat_template_kwargs": members(MANY)}, "chat_template_kwargs"),
    (CHATS, {"messages": one(content=[{"type": "text", "text": "a"}] * 4097)}, "messages[0].content"),
    (CHATS, {"messages": one(tool_calls=calls(4097))}, "messages[0].tool_calls"),
    (
        CHATS,
        {"messages": one(tool_calls=[{"function": {"name": "f", "arguments": members(MANY)}}])},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (COMPLETIONS, {"prompt": "a", "metadata": members(MANY)}, "metadata"),
    (COMPLETIONS, {"prompt": "a", "response_format": members(MANY)}, "response_format"),
    ("/v1/score", {"context": "a", "continuations": ["b"] * 4097}, "continuations"),
    ("/tokenize", {**CHAT, "chat_template_kwargs": members(MANY)}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("path", "body", "param"), LARGE, ids=[f"{path} {at}" for path, _, at in LARGE])
def test_more_entries_are_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"] == f"{param} has more than 4096 entries"


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_the_first_of_many_faults_is_told(http: httpx.Client, name: str) -> None:
    error = http.post(CHATS, json={**CHAT, name: [5] * MANY}).json()["error"]
    assert error["message"] == f"{name}[0] must be an object, not 5"


def test_text_or_an_object(http: httpx.Client) -> None:
    error = http.post(CHATS, json={**CHAT, "tool_choice": 5}).json()["error"]
    assert (error["param"], error["message"]) == (
        "tool_choice",
        "tool_choice must be text or an object, not 5",
    )
