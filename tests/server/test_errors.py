"""Wrong requests: OpenAI's shape of errors, the right status, the field at fault, and words worth reading."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from tests.server.joined import joined, meanwhile, stream
from tests.server.running import MODEL_NAME, MakeServer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPT_FORMS = "prompt must be text, a list of texts, a list of token ids or a list of such lists, not "
pytestmark = pytest.mark.usefixtures("no_leak")


def check(
    answer: httpx.Response, status: int, param: str | None, message: str, code: str | None = None
) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert list(content) == ["error"]
    error = content["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["message"]) == (param, message)
    if code is not None:
        assert error["code"] == code


BAD_PROMPTS: list[tuple[Any, str, str]] = [
    (5, "prompt", PROMPT_FORMS + "5"),
    (None, "prompt", PROMPT_FORMS + "null"),
    ({"a": 1}, "prompt", PROMPT_FORMS + '{"a": 1}'),
    ([], "prompt", "prompt must not be empty"),
    ([[]], "prompt[0]", "prompt[0] must not be empty"),
    (["a", 1], "prompt[1]", "prompt[1] must be text, not 1"),
    ([1, "a"], "prompt[1]", 'prompt[1] must be an integer, not "a"'),
    ([[1], "a"], "prompt[1]", 'prompt[1] must be a list, not "a"'),
    ([1.0], "prompt[0]", "prompt[0] must be an integer, not 1.0"),
    ([True], "prompt[0]", "prompt[0] must be an integer, not true"),
    ([-1], "prompt[0]", "prompt[0] must be at least 0, not -1"),
    ([10**25], "prompt[0]", f"prompt[0] must be at most 2147483647, not {10**25}"),
    ([[[1]]], "prompt[0][0]", "prompt[0][0] must be an integer, not [1]"),
    ([288], "prompt", "token id 288 is outside the vocabulary of 288"),
    ([[1], [2, 300]], "prompt[1]", "prompt[1]: token id 300 is outside the vocabulary of 288"),
    ("", "prompt", "the prompt is empty: it has no tokens"),
    (["a", ""], "prompt[1]", "prompt[1]: the prompt is empty: it has no tokens"),
    ("\ud800", "prompt", "prompt has a lone surrogate, which is no Unicode text"),
    (["a", "b\udfff"], "prompt[1]", "prompt[1] has a lone surrogate, which is no Unicode text"),
    (["a"] * 4097, "prompt", "prompt has more than 4096 entries"),
]


@pytest.mark.parametrize(("prompt", "param", "message"), BAD_PROMPTS, ids=lambda value: repr(value)[:40])
def test_prompts(http: httpx.Client, prompt: Any, param: str, message: str) -> None:
    answer = http.post(COMPLETIONS, content=json.dumps({"prompt": prompt}), headers=JSON)
    check(answer, 400, param, message, "invalid_value")


JSON = {"content-type": "application/json"}
BAD_FIELDS: list[tuple[str, Any, str, str]] = [
    ("max_tokens", -1, "", "must be at least 0, not -1"),
    ("max_tokens", "5", "", 'must be an integer, not "5"'),
    ("max_tokens", 1.5, "", "must be an integer, not 1.5"),
    ("max_tokens", 10**30, "", f"must be at most 2147483647, not {10**30}"),
    ("max_tokens", 0, "", "0 needs echo: there would be no text"),
    ("temperature", -0.1, "", "must be at least 0, not -0.1"),
    ("temperature", True, "", "must be a number, not true"),
    ("temperature", float("nan"), "", "must be a finite number, not NaN"),
    ("temperature", float("inf"), "", "must be a finite number, not Infinity"),
    ("temperature", 10**400, "", f"must be a number, not {'1' + '0' * 59}…"),
    ("top_p", 0, "", "must be above 0, not 0"),
    ("top_p", 1.1, "", "must be at most 1, not 1.1"),
    ("top_k", -2, "", "must be at least -1, not -2"),
    ("min_p", 2, "", "must be at most 1, not 2"),
    ("n", 0, "", "must be at least 1, not 0"),
    ("n", 129, "", "must be at most 128, not 129"),
    ("stop", 5, "", "must be text or a list of texts, not 5"),
    ("stop", "", "", "must not be empty"),
    ("stop", ["a", 5], "[1]", "must be text, not 5"),
    ("stop", ["a", ""], "[1]", "must not be empty"),
    ("stop", ["a"] * 65, "", "has more than 64 entries"),
    ("stop", "a" * 1025, "", "has more than 1024 characters"),
    ("stop", "\ud800", "", "has a lone surrogate, which is no Unicode text"),
    ("stop_token_ids", [5, "a"], "[1]", 'must be an integer, not "a"'),
    ("logit_bias", [1], "", "must be an object, not [1]"),
    ("logit_bias", {"x": 1}, ".x", 'must be a token id in decimal digits, not "x"'),
    ("logit_bias", {"5": 101}, ".5", "must be at most 100, not 101"),
    ("logit_bias", {str(i): 1 for i in range(4097)}, "", "has more than 4096 entries"),
    ("logprobs", True, "", "must be an integer, not true"),
    ("logprobs", 21, "", "21 is above the limit of 20"),
    ("prompt_logprobs", 21, "", "21 is above the limit of 20"),
    ("seed", 2**64, "", f"must be at most {2**64 - 1}, not {2**64}"),
    ("presence_penalty", 3, "", "must be at most 2, not 3"),
    ("repetition_penalty", 0, "", "must be at least 0.0001, not 0"),
    ("min_tokens", 17, "", "17 is above max_tokens 16"),
    ("stream", "yes", "", 'must be true or false, not "yes"'),
    ("stream_options", {}, "", "needs stream"),
    ("stream_options", {"include_usage": 1}, ".include_usage", "must be true or false, not 1"),
    ("priority", 3, "", "3 with scheduling policy 'fcfs': it needs 'priority'"),
    ("cache_salt", "", "", "must not be empty"),
    ("cache_salt", "a" * 1025, "", "has more than 1024 characters"),
    ("timeout", 0, "", "must be above 0, not 0"),
    ("model", 5, "", "must be text, not 5"),
]


@pytest.mark.parametrize(("name", "value", "inner", "fault"), BAD_FIELDS, ids=lambda value: repr(value)[:30])
def test_fields(http: httpx.Client, name: str, value: Any, inner: str, fault: str) -> None:
    answer = http.post(COMPLETIONS, content=json.dumps({"prompt": "a", name: value}), headers=JSON)
    check(answer, 400, name + inner, f"{name}{inner} {fault}", "invalid_value")


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", [300]), ("logit_bias", {"300": 1}), ("logit_bias", {"4294967295": 1})],
)
def test_token_ids_outside_the_vocabulary(http: httpx.Client, name: str, value: Any) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", name: value})
    token_id = next(iter(value))
    if int(token_id) < 2**31:
        check(answer, 400, name, f"{name}: {token_id} is outside the vocabulary of 288")
    else:
        check(answer, 400, name, f"{name} must be from 0 to 2147483647, not {token_id}")


UNSUPPORTED: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "suffix", "x", "suffix is not supported: the model continues texts at their end only"),
    (COMPLETIONS, "best_of", 3, "best_of other than n is not supported"),
    (
        COMPLETIONS,
        "response_format",
        {"type": "json_object"},
        "response_format is supported with {'type': 'text'} only",
    ),
    (
        CHATS,
        "response_format",
        {"type": "json_schema"},
        "response_format is supported with {'type': 'text'} only",
    ),
    (CHATS, "tools", [{"type": "function", "function": {"name": "f"}}], "tools are not supported yet"),
    (CHATS, "tool_choice", "required", "tool_choice is supported as 'none' and 'auto' only"),
    (CHATS, "functions", [{"name": "f"}], "functions are not supported"),
]


@pytest.mark.parametrize(("path", "name", "value", "message"), UNSUPPORTED)
def test_fields_that_are_not_supported(
    http: httpx.Client, path: str, name: str, value: Any, message: str
) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    check(http.post(path, json={**body, name: value}), 400, name, message, "unsupported_parameter")


CONTENT = "messages[0].content"
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "messages is required"),
    ({"messages": []}, "messages", "messages must not be empty"),
    ({"messages": "Hi"}, "messages", 'messages must be a list, not "Hi"'),
    ({"messages": [5]}, "messages[0]", "messages[0] must be an object, not 5"),
    ({"messages": [{}]}, "messages[0].role", "messages[0].role is required"),
    (
        {"messages": [{"role": "x", "content": "a"}]},
        "messages[0].role",
        "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool', not \"x\"",
    ),
    ({"messages": [{"role": "user"}]}, CONTENT, f"{CONTENT} is a string or a list of text parts"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        CONTENT,
        f"{CONTENT} must be text or a list of parts, not 5",
    ),
    (
        {"messages": [*HI, {"role": "user", "content": ["a"]}]},
        "messages[1].content[0]",
        'messages[1].content[0] must be an object, not "a"',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        f"{CONTENT}[0]",
        f"{CONTENT}[0]: only text parts are supported, not 'image_url'",
    ),
    (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        CONTENT,
        f"{CONTENT} has a lone surrogate, which is no Unicode text",
    ),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
    ({"messages": HI, "logprobs": 2}, "logprobs", "logprobs must be true or false, not 2"),
    (
        {"messages": HI, "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs 21 is above the limit of 20",
    ),
    ({"messages": HI, "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
    (
        {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2},
        "max_tokens",
        "max_tokens and max_completion_tokens are the same, and differ",
    ),
    (
        {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
        "add_generation_prompt and continue_final_message exclude each other",
    ),
    ({"messages": HI, "echo": True}, "echo", "echo needs continue_final_message: it is that message's text"),
    (
        {"messages": HI, "chat_template_kwargs": {"x": 1}},
        "chat_template_kwargs",
        "chat_template_kwargs may set documents, enable_thinking, reasoning_effort, thinking, "
        "tools_in_user_message, and not x",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS, ids=lambda value: repr(value)[:50])
def test_chats(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    check(http.post(CHATS, content=json.dumps(body), headers=JSON), 400, param, message, "invalid_value")


BAD_OTHERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/score", {"continuations": ["a"]}, "context", "context is required"),
    (
        "/v1/score",
        {"context": 5, "continuations": ["a"]},
        "context",
        "context must be text or a list of token ids, not 5",
    ),
    (
        "/v1/score",
        {"context": "a", "continuations": "b"},
        "continuations",
        'continuations must be a list, not "b"',
    ),
    ("/v1/score", {"context": "a", "continuations": []}, "continuations", "continuations must not be empty"),
    (
        "/v1/score",
        {"context": "a", "continuations": ["b", ""]},
        "continuations[1]",
        "continuations[1]: it adds no tokens to its context",
    ),
    (
        "/v1/score",
        {"context": "a", "continuations": ["b", [300]]},
        "continuations[1]",
        "continuations[1]: token id 300 is outside the vocabulary of 288",
    ),
    (
        "/v1/score",
        {"context": [300], "continuations": ["b"]},
        "context",
        "token id 300 is outside the vocabulary of 288",
    ),
    ("/tokenize", {}, "prompt", "give either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "give either prompt or messages"),
    ("/tokenize", {"prompt": 5}, "prompt", "prompt must be text, not 5"),
    ("/detokenize", {"tokens": [1, 288]}, "tokens", "token id 288 is outside the vocabulary of 288"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", 'tokens[0] must be an integer, not "a"'),
    ("/detokenize", {"tokens": "a"}, "tokens", 'tokens must be a list, not "a"'),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD_OTHERS, ids=lambda value: repr(value)[:40])
def test_scores_and_tokens(http: httpx.Client, path: str, body: Any, param: str, message: str) -> None:
    check(http.post(path, json=body), 400, param, message, "invalid_value")


UNREADABLE = (
    "The body can't be read as JSON: it must be UTF-8, without numbers of thousands of digits or nesting of "
    "hundreds of levels."
)
NO_JSON: list[tuple[bytes, str]] = [
    (b"", "The body is missing."),
    (b"{", "The body is not JSON: Expecting property name enclosed in double quotes."),
    (b"prompt=a", "The body is not JSON: Expecting value."),
    (b"[]", "The body must be a JSON object, not []."),
    (b"null", "The body must be a JSON object, not null."),
    (b'"prompt"', 'The body must be a JSON object, not "prompt".'),
    (b'{"prompt": "\xff"}', UNREADABLE),
    (b'{"seed": ' + b"9" * 5000 + b"}", UNREADABLE),
    (b"[" * 100_000, UNREADABLE),
    (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", UNREADABLE),
]


@pytest.mark.parametrize(("body", "message"), NO_JSON, ids=lambda value: repr(value)[:30])
def test_bodies_that_are_no_json_objects(http: httpx.Client, body: bytes, message: str) -> None:
    for path in (COMPLETIONS, CHATS, "/v1/score", "/tokenize", "/detokenize"):
        check(http.post(path, content=body, headers=JSON), 400, None, message)


@pytest.mark.parametrize("depth", [10, 300, 700])
@pytest.mark.parametrize("field", ["prompt", "stop", "logit_bias", "unknown", "response_format"])
def test_deep_values_are_only_wrong(http: httpx.Client, field: str, depth: int) -> None:
    body = (
        json.dumps({"prompt": "a", "max_tokens": 1})[:-1] + f', "{field}": ' + "[" * depth + "]" * depth + "}"
    )
    answer = http.post(COMPLETIONS, content=body, headers=JSON)
    if field == "unknown":
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("depth", [10, 700])
def test_deep_values_in_a_template(http: httpx.Client, depth: int) -> None:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    body = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {"documents": value}}
    answer = http.post(CHATS, json=body)
    if depth == 10:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the chat template fails: ")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_bodies_of_another_type(http: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    message = "The body is read as JSON: send it with content-type: application/json."
    check(answer, 415, None, message, "unsupported_media_type")


def test_an_unknown_model(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.completions.create(model="gpt-5", prompt="a"),
        lambda: client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "The model 'gpt-5' does not exist; this server has 'tiny'." in str(caught.value)


def test_other_paths_and_methods(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404, None, "Not Found", "not_found")
    for path in (COMPLETIONS, CHATS, "/v1/score", "/tokenize", "/detokenize"):
        answer = http.get(path)
        check(answer, 405, None, "Method Not Allowed", "method_not_allowed")
        assert answer.headers["allow"] == "POST"
    check(http.post("/v1/models"), 405, None, "Method Not Allowed", "method_not_allowed")


def test_strict_servers_refuse_unknown_fields(make_server: MakeServer) -> None:
    http = make_server(strict=True).http()
    answer = http.post(COMPLETIONS, json={"prompt": "a", "zebra": 1, "aardvark": 2})
    check(answer, 400, "aardvark", "unknown fields: aardvark, zebra", "unknown_field")
    messages = [{"role": "user", "content": "a", "mood": "good"}]
    answer = http.post(CHATS, json={"messages": messages, "max_tokens": 1})
    check(answer, 400, "messages[0].mood", "unknown fields: messages[0].mood", "unknown_field")
    assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_errors_by_openais_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL_NAME, prompt="a", temperature=-1, stream=True)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [*["a"] * 100_000, 1]},
        {"prompt": [1.5] * 200_000},
        {"prompt": [[1.5]] * 200_000},
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}},
        {"prompt": "a", "stop": [1] * 200_000},
        {"prompt": "a", "stop_token_ids": ["x"] * 200_000},
    ],
    ids=["texts", "ids", "lists", "logit_bias", "stop", "stop_token_ids"],
)
def test_many_faults_take_no_more_memory_than_one(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    assert len(answer.content) < 400


def test_wrong_requests_disturb_nobody(http: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "seed": 1, "ignore_eos": True}
    alone = joined(stream(http, COMPLETIONS, body))

    def misbehave() -> None:
        for prompt, _, _ in BAD_PROMPTS[:-1]:
            http.post(COMPLETIONS, content=json.dumps({"prompt": prompt}), headers=JSON)

    with meanwhile(misbehave):
        disturbed = joined(stream(http, COMPLETIONS, body))
    assert disturbed == alone
