"""Fields that mean nothing here: which are named, and how many."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loadproof.server.schemas.chat import ChatRequest

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"role": "user", "content": "Hi"}


def unknown(count: int) -> dict[str, Any]:
    return {f"x{place:06d}": 1 for place in range(count)}


def many_parts(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part] * 4096}]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [HI], **unknown(100_000)},
        {"messages": [{**HI, **unknown(100_000)}]},
        {"messages": [{**HI, **unknown(9)}] * 4096},
        many_parts({"type": "text", "text": "a", **unknown(2)}),
    ],
    ids=["body", "message", "messages", "parts"],
)
def test_no_more_are_collected_than_can_be_told(body: dict[str, Any]) -> None:
    found = ChatRequest.model_validate(body).unknown_fields()
    assert len(found) == len(set(found)) == 100


@pytest.mark.parametrize(("value", "is_strict"), [(None, False), (None, True), (0, False)])
def test_null_is_absent(http: httpx.Client, strict: httpx.Client, value: Any, is_strict: bool) -> None:
    message = {**HI, "mood": value}
    body = {"messages": [message], "max_tokens": 1, "mood": value}
    answer = (strict if is_strict else http).post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    named = None if value is None else "mood, messages[0].mood"
    assert answer.headers.get("x-ignored-fields") == named


def test_null_hides_nothing(strict: httpx.Client) -> None:
    body = {"prompt": "a", **dict.fromkeys(unknown(1000)), "mood": "good"}
    assert strict.post(COMPLETIONS, json=body).json()["error"]["param"] == "mood"


def test_many_are_named_as_far_as_a_header_goes(http: httpx.Client, strict: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1, **unknown(100_000)}
    names = http.post(COMPLETIONS, json=body).headers["x-ignored-fields"]
    assert names.startswith("x000000, x000001, ")
    assert len(names) <= 1000
    error = strict.post(COMPLETIONS, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", "x000000")
    assert len(error["message"]) <= 500
