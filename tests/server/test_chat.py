"""``/v1/chat/completions`` by OpenAI's client: what it answers is what :meth:`LLM.chat` does."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from tests.server.joined import joined, stream, whole
from tests.server.running import MODEL_NAME, MakeServer, Running

from loadproof import LLM, SamplingParams
from loadproof.engine.output import CompletionOutput, RequestOutput
from loadproof.server.schemas.chat import ChatMessage

PATH = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
pytestmark = pytest.mark.usefixtures("no_leak")


def ask(client: openai.OpenAI, messages: Any = HI, *, extra: Any = None, **options: Any) -> dict[str, Any]:
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, extra_body={"return_token_ids": True, **(extra or {})}, **options
    )
    found: dict[str, Any] = answer.to_dict()
    return found


def completed(llm: LLM, prompt: str, **options: Any) -> RequestOutput:
    """What the model makes of a chat that the template writes as this."""
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    (output,) = llm.generate(ids, SamplingParams(**{"temperature": 0, **options}), use_tqdm=False)
    return output


def check_choice(choice: dict[str, Any], expected: CompletionOutput) -> None:
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected.text
    assert choice["token_ids"] == expected.token_ids
    assert choice["finish_reason"] == expected.finish_reason
    assert choice["seed"] == expected.seed


CHATS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (HI, {}, "<user>Hi\n<assistant>"),
    ([{"role": "system", "content": "Be brief."}, *HI], {}, "<system>Be brief.\n<user>Hi\n<assistant>"),
    ([{"role": "developer", "content": "Be brief."}, *HI], {}, "<system>Be brief.\n<user>Hi\n<assistant>"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        {},
        "<user>a\nb\n<assistant>",
    ),
    (
        [
            *HI,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ],
        {},
        "<user>Hi\n<assistant>[clock]\n<tool>noon\n<assistant>",
    ),
    (HI, {"add_generation_prompt": False}, "<user>Hi\n"),
    (
        [*HI, {"role": "assistant", "content": "Well"}],
        {"continue_final_message": True},
        "<user>Hi\n<assistant>Well",
    ),
    (
        [*HI, {"role": "assistant", "content": "Well"}],
        {"continue_final_message": True, "add_generation_prompt": False},
        "<user>Hi\n<assistant>Well",
    ),
    (HI, {"chat_template_kwargs": {"thinking": True}}, "(think)<user>Hi\n<assistant>"),
    (HI, {"add_special_tokens": True}, "<user>Hi\n<assistant>"),
    (HI, {"tool_choice": "none", "tools": []}, "<user>Hi\n<assistant>"),
    (HI, {"response_format": {"type": "text"}}, "<user>Hi\n<assistant>"),
]


@pytest.mark.parametrize(("messages", "extra", "prompt"), CHATS)
def test_the_template_writes_the_prompt(
    client: openai.OpenAI, reference: LLM, messages: Any, extra: dict[str, Any], prompt: str
) -> None:
    answer = ask(client, messages, extra=extra, max_tokens=6, temperature=0, seed=0)
    expected = completed(reference, prompt, max_tokens=6, seed=0)
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    check_choice(answer["choices"][0], expected.outputs[0])


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "n": 3},
    {"temperature": 1.0, "seed": -1, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.0, "seed": 0, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 1.0, "seed": 1, "stop": ["e", "a"], "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 1, "stop_token_ids": [70, 71, 72], "frequency_penalty": 1.0},
]


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: ",".join(options))
def test_every_parameter_means_what_it_means_in_python(
    http: httpx.Client, reference: LLM, options: dict[str, Any]
) -> None:
    body = {"messages": HI, "max_completion_tokens": 20, "return_token_ids": True, **options}
    answer = http.post(PATH, json=body).json()
    (expected,) = reference.chat(HI, SamplingParams(max_tokens=20, **options), use_tqdm=False)
    for choice, one in zip(answer["choices"], expected.outputs, strict=True):
        check_choice(choice, one)
        assert choice["stop_reason"] == one.stop_reason
    num_output = sum(len(one.token_ids) for one in expected.outputs)
    assert answer["usage"]["completion_tokens"] == num_output
    assert answer["system_fingerprint"] == reference.system_fingerprint
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL_NAME)


def test_without_a_limit_it_goes_on_to_the_models(client: openai.OpenAI) -> None:
    answer = ask(client, extra={"ignore_eos": True}, temperature=0)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("top", [None, 0, 1, 5])
def test_logprobs(client: openai.OpenAI, reference: LLM, top: int | None) -> None:
    options = {} if top is None else {"top_logprobs": top}
    answer = ask(client, max_tokens=8, seed=3, temperature=1.5, logprobs=True, **options)
    (choice,) = answer["choices"]
    expected = completed(
        reference, "<user>Hi\n<assistant>", max_tokens=8, seed=3, temperature=1.5, logprobs=top or 0
    )
    (one,) = expected.outputs
    assert one.logprobs is not None
    content = choice["logprobs"]["content"]
    assert len(content) == len(one.token_ids)
    for entry, token_id, position in zip(content, one.token_ids, one.logprobs, strict=True):
        assert entry["logprob"] == position[token_id].logprob
        assert entry["token"] == position[token_id].decoded_token
        assert bytes(entry["bytes"]) == reference.tokenizer.token_bytes(token_id)
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == (top or 0)
        assert values == sorted(values, reverse=True)
        best = [logprob.logprob for logprob in position.values() if logprob.rank <= (top or 0)]
        assert values == sorted(best, reverse=True)
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    assert choice["message"]["content"] == text


STREAMED: list[dict[str, Any]] = [
    {"max_tokens": 20, "seed": 1},
    {"max_tokens": 20, "seed": 1, "n": 3, "return_token_ids": True},
    {"max_tokens": 20, "seed": 1, "logprobs": True, "top_logprobs": 3, "n": 2},
    {"max_tokens": 40, "seed": 5, "stop": ["a", "e"], "temperature": 1.0},
    {"max_tokens": 60, "seed": 5, "logit_bias": {"130": 100, "103": 100}},
    {"max_tokens": 4, "seed": 5, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("body", STREAMED, ids=lambda body: ",".join(body))
def test_a_stream_joined_is_the_whole(http: httpx.Client, body: dict[str, Any]) -> None:
    body = {"messages": HI, **body}
    answer = http.post(PATH, json=body).json()
    chunks = stream(http, PATH, body)
    expected = [whole(choice) for choice in answer["choices"]]
    for choice in expected:  # the prompt's are the answer's own there, the first chunk's here
        for name in ("prompt_logprobs", "prompt_token_ids"):
            if answer.get(name) is not None:
                choice[name] = answer[name]
    found = joined(chunks)
    for choice in (*expected[1:], *found[1:]):
        choice.pop("prompt_logprobs", None)
    assert found == expected
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(len(expected)):
        first = next(c["choices"][0] for c in chunks if c["choices"][0]["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""}


def test_echo_begins_with_the_message_that_goes_on(http: httpx.Client) -> None:
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 5, "temperature": 0}
    (plain,) = http.post(PATH, json=body).json()["choices"]
    (echoed,) = http.post(PATH, json={**body, "echo": True}).json()["choices"]
    assert echoed["message"]["content"] == "Well" + plain["message"]["content"]
    (streamed,) = joined(stream(http, PATH, {**body, "echo": True}))
    assert streamed["text"] == echoed["message"]["content"]


def test_streams_by_openais_client(client: openai.OpenAI, reference: LLM) -> None:
    (plain,) = reference.chat(HI, SamplingParams(max_tokens=9, temperature=0), use_tqdm=False)
    stop = plain.outputs[0].token_ids[8]  # this client's helper takes an end by length for an error
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[stop])
    (expected,) = reference.chat(HI, params, use_tqdm=False)
    with client.chat.completions.stream(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=20,
        temperature=0,
        logprobs=True,
        extra_body={"stop_token_ids": [stop]},
        stream_options={"include_usage": True},
    ) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert final.choices[0].message.content == expected.outputs[0].text
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert len(final.choices[0].logprobs.content) == len(expected.outputs[0].token_ids)
    assert final.usage is not None
    assert final.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert final.usage.prompt_tokens_details is not None
    assert final.system_fingerprint == reference.system_fingerprint


def test_a_raw_response(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        user="me",
        extra_body={"mood": "good"},
    )
    assert raw.http_response.status_code == 200
    assert raw.headers["x-ignored-fields"] == "mood"
    assert raw.parse().choices[0].finish_reason == "length"


def test_fields_of_messages_that_mean_nothing_are_named(http: httpx.Client) -> None:
    part = {"type": "text", "text": "a", "cache_control": {}}
    messages = [{"role": "user", "content": [part], "mood": "good"}, {"role": "user", "content": "b", "x": 1}]
    answer = http.post(PATH, json={"messages": messages, "max_tokens": 1})
    names = answer.headers["x-ignored-fields"].split(", ")
    assert names == ["messages[0].mood", "messages[0].content[0].cache_control", "messages[1].x"]


async def ask_at_once(url: str, count: int) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=MODEL_NAME, messages=[{"role": "user", "content": f"{i}"}], max_tokens=9, seed=i
                )
                for i in range(count)
            )
        )
    return [answer.choices[0].message.content for answer in answers]


def test_ignored_fields_of_calls_reach_no_template() -> None:
    """They come back where streams of deltas are put together, and templates write calls as a whole."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    more = {**call, "index": 0, "type": None, "function": {"name": "f", "arguments": "{}", "extra": "\ud800"}}
    message = ChatMessage.model_validate({"role": "assistant", "content": "a", "tool_calls": [more], "x": 1})
    assert message.for_template() == {"role": "assistant", "content": "a", "tool_calls": [call]}
    assert list(message.for_template()["tool_calls"][0]) == ["id", "type", "function"]


@pytest.mark.parametrize("depth", [5, 32, 33, 64, 900, 100_000])
def test_arguments_of_calls_may_be_as_deep_as_they_like(http: httpx.Client, depth: int) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert http.post("/tokenize", json={"messages": messages}).status_code == 200


def test_many_at_once_by_the_async_client(server: Running, reference: LLM) -> None:
    texts = asyncio.run(ask_at_once(server.url, 20))
    chats = [[{"role": "user", "content": f"{i}"}] for i in range(20)]
    outputs = reference.chat(chats, [SamplingParams(max_tokens=9, seed=i) for i in range(20)], use_tqdm=False)
    assert texts == [output.outputs[0].text for output in outputs]


def test_names_that_templates_may_be_given(make_server: MakeServer) -> None:
    http = make_server(template_arguments=("mood", "messages", "add_generation_prompt")).http()
    body = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {"mood": 1}}
    assert http.post(PATH, json=body).status_code == 200
    for name in ("messages", "add_generation_prompt", "thinking"):
        answer = http.post(PATH, json={**body, "chat_template_kwargs": {name: True}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
