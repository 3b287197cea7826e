"""OpenAI's fields that mean nothing here are known, also to a strict server, and change no answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loadproof.server.schemas.chat import ChatMessage

INERT: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "parallel_tool_calls": False,
}
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HI},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", INERT)
def test_each_is_known_and_has_its_type(strict: httpx.Client, path: str, name: str) -> None:
    body = {**BODIES[path], "max_tokens": 1, "seed": 1}
    plain = strict.post(path, json=body).json()["choices"]
    for value in (INERT[name], None):
        answer = strict.post(path, json={**body, name: value})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain
    assert strict.post(path, json={**body, name: 5}).json()["error"]["param"] == name


@pytest.mark.parametrize("refusal", [None, "I won't."])
def test_an_answers_message_can_be_sent_again(strict: httpx.Client, refusal: str | None) -> None:
    answer = strict.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4, "seed": 1})
    message = answer.json()["choices"][0]["message"]
    assert message["refusal"] is None
    # OpenAI's client writes its other fields as null.
    chat = [
        *HI,
        {**message, "refusal": refusal, "annotations": None, "audio": None, "function_call": None},
        *HI,
    ]
    for path in ("/v1/chat/completions", "/tokenize"):
        extra = {"max_tokens": 1} if path != "/tokenize" else {}
        answer = strict.post(path, json={"messages": chat, **extra})
        assert answer.status_code == 200, answer.text
    bare = [*HI, {"role": "assistant", "content": message["content"]}, *HI]
    assert answer.json() == strict.post("/tokenize", json={"messages": bare}).json()


def test_a_refusal_without_content_can_be_sent_again(strict: httpx.Client) -> None:
    said = [{"role": "assistant", "content": content, "refusal": "I won't."} for content in (None, "")]
    tokens = [strict.post("/tokenize", json={"messages": [*HI, one, *HI]}).json()["tokens"] for one in said]
    assert tokens[0] == tokens[1]


PLAIN: list[dict[str, Any]] = [
    {"logprobs": False, "top_logprobs": 0},
    {"top_logprobs": 0},
    {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}},
    {"stream": True, "stream_options": {"include_usage": False}},
]


@pytest.mark.parametrize("fields", PLAIN, ids=str)
def test_what_asks_for_nothing_changes_nothing(strict: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": HI, "max_tokens": 1, "seed": 1}
    answer = strict.post("/v1/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    if "stream" in fields:
        assert "usage" not in answer.text
    else:
        assert answer.json()["choices"] == strict.post("/v1/chat/completions", json=body).json()["choices"]


@pytest.mark.parametrize("count", [1, -1])
def test_top_logprobs_needs_logprobs(strict: httpx.Client, count: int) -> None:
    answer = strict.post("/v1/chat/completions", json={"messages": HI, "top_logprobs": count})
    assert answer.json()["error"]["message"] == "top_logprobs needs logprobs"


def test_templates_are_not_given_a_refusal() -> None:
    message = ChatMessage(role="assistant", content="a", refusal="I won't.")
    assert message.for_template() == {"role": "assistant", "content": "a"}
