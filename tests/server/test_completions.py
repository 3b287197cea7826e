"""``/v1/completions`` by OpenAI's client: what it answers is what :class:`LLM` generates, streamed or not."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from tests.server.joined import joined, stream, whole
from tests.server.running import MODEL_NAME, MakeServer, Running

from loadproof import LLM, SamplingParams
from loadproof.engine.output import CompletionOutput, PositionLogprobs, RequestOutput

PATH = "/v1/completions"
pytestmark = pytest.mark.usefixtures("no_leak")


def ask(client: openai.OpenAI, prompt: Any, **options: Any) -> dict[str, Any]:
    """OpenAI's own arguments as such, others as ``extra_body``, as its users write them."""
    own = {"echo", "logprobs", "n", "suffix", "max_tokens", "stop", "seed", "temperature", "top_p", "best_of"}
    own |= {"logit_bias", "presence_penalty", "frequency_penalty", "stream_options", "user"}
    extra = {name: options.pop(name) for name in list(options) if name not in own}
    answer = client.completions.create(model=MODEL_NAME, prompt=prompt, extra_body=extra, **options)
    found: dict[str, Any] = answer.to_dict()
    return found


def generate(llm: LLM, prompt: Any, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)


def check_choice(choice: dict[str, Any], expected: CompletionOutput) -> None:
    assert choice["text"] == expected.text
    assert choice["token_ids"] == expected.token_ids
    assert choice["finish_reason"] == expected.finish_reason
    assert choice["stop_reason"] == expected.stop_reason
    assert choice["seed"] == expected.seed
    if expected.logprobs is not None:
        chosen = [next(iter(position.values())).logprob for position in expected.logprobs]
        assert choice["logprobs"]["token_logprobs"] == chosen


def prompt_entries(positions: Any) -> list[Any]:
    return [position and entries(position) for position in positions]


def entries(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in position.items()
    }


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_p": 0.8},
    {"temperature": 1.0, "seed": -9, "top_k": 20},
    {"temperature": 1.0, "seed": 2**64 - 1, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.5, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0.0, "ignore_eos": True, "min_tokens": 5},
    {"temperature": 1.0, "seed": 1, "stop_token_ids": list(range(60, 80))},
    {
        "temperature": 1.0,
        "seed": 4,
        "stop_token_ids": list(range(60, 80)),
        "include_stop_str_in_output": True,
    },
    {"temperature": 1.0, "seed": 2, "n": 3},
    {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 4},
    {"temperature": 3.0, "seed": 5, "skip_special_tokens": False, "logit_bias": {"0": 5.0, "1": -100.0}},
]


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: ",".join(options))
def test_every_parameter_means_what_it_means_in_python(
    client: openai.OpenAI, reference: LLM, options: dict[str, Any]
) -> None:
    answer = ask(client, "The sea", max_tokens=12, return_token_ids=True, **options)
    in_python = {**options, "logit_bias": {int(k): v for k, v in options.get("logit_bias", {}).items()}}
    if "seed" not in options:
        in_python["seed"] = answer["choices"][0]["seed"]
    (expected,) = generate(reference, "The sea", max_tokens=12, **in_python)
    assert len(answer["choices"]) == len(expected.outputs)
    for choice, one in zip(answer["choices"], expected.outputs, strict=True):
        check_choice(choice, one)
        assert choice["prompt_token_ids"] == expected.prompt_token_ids
        if expected.prompt_logprobs is not None:
            assert choice["prompt_logprobs"] == prompt_entries(expected.prompt_logprobs)
    num_output = sum(len(one.token_ids) for one in expected.outputs)
    num_prompt = len(expected.prompt_token_ids)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == num_output
    assert answer["usage"]["total_tokens"] == num_prompt + num_output
    assert answer["system_fingerprint"] == reference.system_fingerprint


PROMPTS: list[Any] = ["one", ["one"], ["one", "two", "three"], [5, 6, 7], [[5, 6, 7]], [[5], [6, 7], [8]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_every_form_of_prompt(client: openai.OpenAI, reference: LLM, prompt: Any) -> None:
    answer = ask(client, prompt, max_tokens=4, temperature=0, seed=1, n=2, return_token_ids=True)
    outputs = generate(reference, prompt, max_tokens=4, temperature=0, seed=1, n=2)
    expected = [one for output in outputs for one in output.outputs]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    for choice, one in zip(answer["choices"], expected, strict=True):
        check_choice(choice, one)
    assert answer["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)


STREAMED: list[dict[str, Any]] = [
    {"prompt": "Once", "max_tokens": 30, "seed": 1},
    {"prompt": "Once", "max_tokens": 30, "seed": 1, "logprobs": 3},
    {"prompt": "Once", "max_tokens": 30, "seed": 1, "n": 4, "return_token_ids": True},
    {"prompt": ["Once", "upon", "a time"], "max_tokens": 20, "seed": 3, "n": 2, "logprobs": 0},
    {"prompt": ["Once", "upon"], "max_tokens": 9, "seed": 3, "n": 2, "logprobs": 2, "echo": True},
    {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 9, "seed": 3, "echo": True, "return_token_ids": True},
    {"prompt": [2, 200, 150], "max_tokens": 9, "seed": 3, "echo": True, "logprobs": 1},
    {"prompt": ["Once", "a"], "max_tokens": 0, "seed": 3, "echo": True, "logprobs": 2, "n": 2},
    {"prompt": "Once", "max_tokens": 4, "seed": 3, "prompt_logprobs": 2, "n": 2, "logprobs": 1},
    {"prompt": "😀 naïve 日本", "max_tokens": 9, "seed": 3, "echo": True, "logprobs": 2},
    {"prompt": "x", "max_tokens": 60, "seed": 5, "logit_bias": {"130": 100, "103": 100}, "logprobs": 1},
    {"prompt": "x", "max_tokens": 60, "seed": 5, "stop": ["a", "e", "t"], "n": 3},
    {"prompt": "x", "max_tokens": 60, "seed": 5, "stop": ["a", "e"], "include_stop_str_in_output": True},
]


@pytest.mark.parametrize("body", STREAMED, ids=lambda body: ",".join(body))
def test_a_stream_joined_is_the_whole(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    chunks = stream(http, PATH, body)
    assert joined(chunks) == [whole(choice) for choice in answer.json()["choices"]]
    for name in ("object", "model", "system_fingerprint"):
        assert {chunk[name] for chunk in chunks} == {answer.json()[name]}
    assert len({chunk["id"] for chunk in chunks}) == 1


# Bytes whose random sequences hold whole letters and emoji, cut at every place by their tokens.
@pytest.mark.parametrize("text", ["é", "日", "😀"])
def test_letters_of_several_tokens_are_not_torn(http: httpx.Client, reference: LLM, text: str) -> None:
    bias = dict.fromkeys((str(i) for i in reference.tokenizer.encode(text)), 100)
    body = {"prompt": "x", "max_tokens": 120, "logit_bias": bias, "temperature": 5.0, "seed": 6, "n": 16}
    choices = http.post(PATH, json=body).json()["choices"]
    chunks = stream(http, PATH, body)
    assert joined(chunks) == [whole(choice) for choice in choices]
    assert any(text in choice["text"] for choice in choices)
    whole_letters = sum(choice["text"].count(text) for choice in choices)
    assert sum(piece["text"].count(text) for chunk in chunks for piece in chunk["choices"]) == whole_letters


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings_end_the_text_just_before_them(http: httpx.Client, reference: LLM, length: int) -> None:
    (plain,) = generate(reference, "Once", max_tokens=40, seed=11, temperature=1.0)
    text = plain.outputs[0].text
    for start in range(0, len(text) - length, 7):
        stop = text[start : start + length]
        body = {"prompt": "Once", "max_tokens": 40, "seed": 11, "temperature": 1.0, "stop": [stop, "never"]}
        (choice,) = http.post(PATH, json=body).json()["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert joined(stream(http, PATH, body)) == [whole(choice)]


def test_echo_is_the_prompt_and_then_the_text(client: openai.OpenAI, reference: LLM) -> None:
    (expected,) = generate(
        reference, "Hello there", max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=2
    )
    (choice,) = ask(
        client, "Hello there", max_tokens=6, temperature=0, logprobs=2, echo=True, return_token_ids=True
    )["choices"]
    (one,) = expected.outputs
    assert choice["text"] == "Hello there" + one.text
    lists = choice["logprobs"]
    assert len({len(lists[name]) for name in lists}) == 1
    assert len(lists["tokens"]) == len(expected.prompt_token_ids) + len(one.token_ids)
    assert expected.prompt_logprobs is not None
    assert one.logprobs is not None
    positions = [*expected.prompt_logprobs, *one.logprobs]
    values = [position and next(iter(position.values())).logprob for position in positions]
    assert lists["token_logprobs"] == values
    assert lists["top_logprobs"][0] is lists["token_logprobs"][0] is None
    assert lists["text_offset"][0] == 0
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        if "\ufffd" not in token and offset + len(token) <= len("Hello there"):
            assert choice["text"][offset:].startswith(token)
    for chosen, best in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True):
        assert 2 <= len(best) <= 3
        assert chosen in best.values()
        assert list(best.values())[:2] == sorted(best.values(), reverse=True)[:2]


def test_echo_alone_scores_the_prompt(client: openai.OpenAI, reference: LLM) -> None:
    answer = ask(client, ["A prompt", "B"], max_tokens=0, echo=True, logprobs=1, return_token_ids=True)
    for choice, text in zip(answer["choices"], ("A prompt", "B"), strict=True):
        (expected,) = generate(reference, text, max_tokens=1, prompt_logprobs=1)
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (text, [], "length")
        values = choice["logprobs"]["token_logprobs"]
        assert expected.prompt_logprobs is not None
        positions = expected.prompt_logprobs
        assert values == [position and next(iter(position.values())).logprob for position in positions]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_drawn_seed_is_reported_and_gives_the_same_again(client: openai.OpenAI) -> None:
    first = ask(client, "Once", max_tokens=20, temperature=1.0, n=3)
    seeds = [choice["seed"] for choice in first["choices"]]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    assert len({choice["text"] for choice in first["choices"]}) == 3
    assert seeds[0] < 2**53  # a number that JavaScript holds
    for choice in first["choices"]:
        (again,) = ask(client, "Once", max_tokens=20, temperature=1.0, seed=choice["seed"])["choices"]
        assert again["text"] == choice["text"]
    assert ask(client, "Once", max_tokens=20, temperature=1.0)["choices"][0]["seed"] != seeds[0]


def test_streams_by_openais_client(client: openai.OpenAI, reference: LLM) -> None:
    (expected,) = generate(reference, "Once", max_tokens=9, temperature=0)
    with client.completions.create(
        model=MODEL_NAME,
        prompt="Once",
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        found = list(chunks)
    *pieces, last = found
    assert "".join(piece.choices[0].text for piece in pieces) == expected.outputs[0].text
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.prompt_tokens) == (9, len(expected.prompt_token_ids))


def test_usage_in_every_chunk_and_none_unasked(http: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert all("usage" not in chunk for chunk in stream(http, PATH, body))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, PATH, {**body, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]


def test_cached_tokens_are_reported(make_server: MakeServer) -> None:
    http = make_server(block_size=16).http()
    body = {"prompt": "x" * 70, "max_tokens": 2, "temperature": 0}

    def cached(**more: Any) -> int:
        usage = http.post(PATH, json={**body, **more}).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(), cached()] == [0, 64]
    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 64, 0]
    assert cached(echo=True, logprobs=1) == 64
    chunks = stream(http, PATH, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_warm_and_cold_answers_are_the_same_bits(make_server: MakeServer) -> None:
    http = make_server(block_size=16).http()
    body = {"prompt": "abc" * 30, "max_tokens": 8, "seed": 1, "echo": True, "logprobs": 5}
    cold, warm = (http.post(PATH, json=body).json() for _ in range(2))
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert warm["choices"] == cold["choices"]


def test_priority_with_its_policy(make_server: MakeServer) -> None:
    client = make_server(scheduling_policy="priority").openai()
    assert ask(client, "Once", max_tokens=2, priority=-5)["choices"][0]["finish_reason"] == "length"


def test_fields_that_mean_nothing_are_named(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL_NAME, prompt="a", max_tokens=1, user="me", extra_body={"zebra": 1, "é\n": 2}
    )
    assert raw.headers["x-ignored-fields"] == "zebra, ??"
    assert raw.parse().choices[0].finish_reason == "length"
    with client.completions.with_streaming_response.create(
        model=MODEL_NAME, prompt="a", max_tokens=1, stream=True, extra_body={"stream_options": {"x": 1}}
    ) as response:
        assert response.headers["x-ignored-fields"] == "stream_options.x"
        response.read()


async def ask_at_once(url: str, prompts: list[str], streamed: bool) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(index: int, prompt: str) -> str:
            common: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 15, "seed": index}
            if not streamed:
                whole: str = (await client.completions.create(**common)).choices[0].text
                return whole
            chunks = await client.completions.create(**common, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_many_at_once_by_the_async_client(server: Running, reference: LLM, streamed: bool) -> None:
    prompts = [f"prompt {i}" for i in range(30)]
    texts = asyncio.run(ask_at_once(server.url, prompts, streamed))
    params = [SamplingParams(max_tokens=15, seed=i) for i in range(30)]
    outputs = reference.generate(prompts, params, use_tqdm=False)
    assert texts == [output.outputs[0].text for output in outputs]


def test_impossible_tokens_have_finite_numbers(make_server: MakeServer) -> None:
    """JSON has no infinities, which tokens have that a filter has dropped."""
    http = make_server(logprobs_mode="processed_logprobs").http()
    body = {"prompt": "a", "max_tokens": 3, "logprobs": 20, "top_k": 2, "seed": 1}
    (choice,) = http.post(PATH, json=body).json()["choices"]
    for position in choice["logprobs"]["top_logprobs"]:
        assert sorted(position.values())[:-2] == [-9999.0] * (len(position) - 2)
