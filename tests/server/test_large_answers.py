"""Answers that hold many log-probabilities: bounded, written away from the event loop, and still right."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from tests.server.joined import joined, stream, whole
from tests.server.running import MakeServer, Running

import loadproof.server.logprobs as written
from loadproof import LLM
from loadproof.server import bounds

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "x" * 80}]
IDS = [5 + i % 200 for i in range(100)]
pytestmark = pytest.mark.usefixtures("no_leak")

TOO_LARGE: list[tuple[str, dict[str, Any], int, str]] = [
    (COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 4, "n": 3}, 1500, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": [IDS, IDS], "prompt_logprobs": 4}, 1000, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": IDS, "echo": True, "logprobs": 4, "n": 3}, 1500, "logprobs"),
    (
        COMPLETIONS,
        {"prompt": IDS, "echo": True, "logprobs": 4, "prompt_logprobs": 4},
        1000,
        "prompt_logprobs",
    ),
    (COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 20, "stream": True}, 2100, "prompt_logprobs"),
    (CHATS, {"messages": HI, "prompt_logprobs": 20, "n": 8}, 0, "prompt_logprobs"),
    ("/v1/score", {"context": [5], "continuations": [IDS] * 5}, 1000, "continuations"),
]


@pytest.mark.parametrize(("path", "body", "count", "param"), TOO_LARGE, ids=lambda value: str(value)[:30])
def test_log_probabilities_of_prompts_are_bounded_with_their_repetitions(
    http: httpx.Client,
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    count: int,
    param: str,
) -> None:
    if path == CHATS:  # however often it is answered
        count = 21 * http.post("/tokenize", json={"messages": HI}).json()["count"]
    monkeypatch.setattr(bounds, "MOST_PROMPT_ENTRIES", count)
    assert http.post(path, json={"max_tokens": 1, **body}).status_code == 200
    begun = server.wait_until_idle()["num_requests"]
    monkeypatch.setattr(bounds, "MOST_PROMPT_ENTRIES", count - 1)
    answer = http.post(path, json={"max_tokens": 1, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert str(count) in error["message"]
    assert str(count - 1) in error["message"]
    assert server.wait_until_idle()["num_requests"] == begun


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_what_is_generated_are_bounded(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(bounds, "MOST_OUTPUT_ENTRIES", 2 * 3 * 10)
    body = {"prompt": "a", "logprobs": 1, "n": 3, "stream": streamed}
    assert http.post(COMPLETIONS, json={**body, "max_tokens": 10}).status_code == 200
    answer = http.post(COMPLETIONS, json={**body, "max_tokens": 11})
    assert answer.status_code == 400
    assert "66 log-probabilities of generated tokens; at most 60" in answer.json()["error"]["message"]
    chat = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": streamed}
    assert http.post(CHATS, json=chat).status_code == 400  # it may go on to the model's length


LARGE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [IDS, IDS[::-1]], "n": 2, "prompt_logprobs": 3}),
    (COMPLETIONS, {"prompt": IDS, "n": 3, "echo": True, "logprobs": 3, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}),
    (CHATS, {"messages": HI, "n": 2, "prompt_logprobs": 3, "logprobs": True, "top_logprobs": 3}),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), LARGE, ids=lambda value: ",".join(value))
def test_they_are_written_once_and_not_in_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], streamed: bool
) -> None:
    threads: list[threading.Thread] = []
    entry = written._best

    def best(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return entry(*args)

    prompts: list[int] = []
    entries = written._prompt_entries

    def prompt_entries(positions: Any) -> Any:
        prompts.append(len(positions))
        threads.append(threading.current_thread())
        return entries(positions)

    monkeypatch.setattr(written, "_best", best)
    monkeypatch.setattr(written, "_prompt_entries", prompt_entries)
    request = {"max_tokens": 2, "seed": 1, **body}
    if streamed:
        stream(http, path, request)
    else:
        assert http.post(path, json=request).status_code == 200
    num_prompts = 2 if isinstance(body.get("prompt", [0])[0], list) else 1
    assert len(prompts) == (num_prompts if "prompt_logprobs" in body else 0)
    first, *_ = threads  # the prompt's own; pieces of few entries may be written anywhere
    assert first.name != "server"


@pytest.mark.parametrize(("path", "body"), LARGE, ids=lambda value: ",".join(value))
def test_slices_join_to_the_same_answer(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    request = {"max_tokens": 5, "seed": 1, **body}
    answer = http.post(path, json=request).json()
    monkeypatch.setattr("loadproof.server.json_parts._SLICE", 7)
    sliced = http.post(path, json=request)
    assert int(sliced.headers["content-length"]) == len(sliced.content)
    assert sliced.json()["choices"] == answer["choices"]
    assert sliced.json().get("prompt_logprobs") == answer.get("prompt_logprobs")
    if path == COMPLETIONS:
        assert joined(stream(http, path, request)) == [whole(choice) for choice in answer["choices"]]


def test_an_answer_of_many_choices(make_server: MakeServer) -> None:
    server = make_server(max_num_seqs=8)
    body = {"prompt": ["a", "b"], "n": 40, "max_tokens": 1, "seed": 1, "return_token_ids": True}
    choices = server.http().post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(80))
    assert len({choice["seed"] for choice in choices}) == 40
    server.check_no_leak()


TORN = "a😀é b"


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_of_letters_that_several_tokens_make(
    http: httpx.Client, reference: LLM, as_ids: bool
) -> None:
    ids = reference.tokenizer.encode(TORN, add_special_tokens=False)
    expected = [
        len(b"".join(map(reference.tokenizer.token_bytes, ids[:at])).decode("utf-8", "ignore"))
        for at in range(len(ids))
    ]
    body = {"prompt": ids, "echo": True, "logprobs": 3, "max_tokens": 4, "seed": 1}
    (choice,) = http.post(
        COMPLETIONS, json={**body, "return_tokens_as_token_ids": as_ids, "return_token_ids": True}
    ).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[: len(ids)] == expected
    assert offsets[len(ids)] == len(TORN)
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice["text"])
    if as_ids:
        names = [f"token_id:{token_id}" for token_id in [*ids, *choice["token_ids"]]]
        assert choice["logprobs"]["tokens"] == names
        tops = choice["logprobs"]["top_logprobs"][1:]
        for name, top in zip(names[1:], tops, strict=True):
            assert name in top
            assert len(top) >= 3  # no two share a name


def test_bos_that_was_added_takes_no_place_in_the_text(http: httpx.Client, reference: LLM) -> None:
    bos = reference.tokenizer.bos_id
    assert bos is not None
    text = "ab"
    encoded = reference.tokenizer.encode(text)
    body = {"prompt": [bos, *reference.tokenizer.encode(text, add_special_tokens=False)]}
    settings = {"echo": True, "logprobs": 0, "max_tokens": 0}
    (as_ids,) = http.post(COMPLETIONS, json={**body, **settings}).json()["choices"]
    assert as_ids["text"] == "<s>ab"
    assert as_ids["logprobs"]["text_offset"][:2] == [0, 3]
    (as_text,) = http.post(COMPLETIONS, json={"prompt": text, **settings}).json()["choices"]
    assert as_text["text"] == text
    assert as_text["logprobs"]["text_offset"] == [0, 0, 1][-len(encoded) :]


def test_chats_name_tokens_by_their_ids(http: httpx.Client, reference: LLM) -> None:
    body = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = http.post(CHATS, json={**body, "return_tokens_as_token_ids": True}).json()
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    for entry, token_id in zip(content, choice["token_ids"], strict=True):
        assert bytes(entry["bytes"]) == reference.tokenizer.token_bytes(token_id)
        assert all(top["token"].startswith("token_id:") for top in entry["top_logprobs"])
