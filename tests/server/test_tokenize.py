"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadproof import LLM
from loadproof.tokenizer.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]


def test_a_text(http: httpx.Client, reference: LLM) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hello there"}).json()
    ids = reference.tokenizer.encode("Hello there")
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 256}


def test_the_tokens_as_the_vocabulary_writes_them(http: httpx.Client, reference: LLM) -> None:
    answer = http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert answer["token_strs"] == [reference.tokenizer.id_to_token(i) for i in answer["tokens"]]


def test_many_tokens(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "ab " * 5000, "return_token_strs": True}).json()
    assert http.post("/tokenize", json={"prompt": "ab " * 5000}).json()["tokens"] == answer["tokens"]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 8192


def test_answers_are_made_where_texts_are_encoded(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: set[str] = set()
    name_of = Tokenizer.id_to_token

    def id_to_token(self: Tokenizer, token_id: int) -> str | None:
        makers.add(threading.current_thread().name.split("-")[0].split("_")[0])
        return name_of(self, token_id)

    monkeypatch.setattr(Tokenizer, "id_to_token", id_to_token)
    for prompt in ("a b", "a" * 16384):
        answer = http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})
        assert answer.status_code == 200
    assert makers == {"encoder"}


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "<user>Hi\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>Hi\n"),
        ({"chat_template_kwargs": {"thinking": True}}, "(think)<user>Hi\n<assistant>"),
        ({"continue_final_message": True}, "<user>Hi"),
    ],
)
def test_a_chat_is_what_its_answer_begins_with(
    http: httpx.Client, reference: LLM, options: dict[str, Any], prompt: str
) -> None:
    tokens = http.post("/tokenize", json={"messages": HI, **options}).json()["tokens"]
    assert tokens == reference.tokenizer.encode(prompt, add_special_tokens=False)
    body = {"messages": HI, "max_tokens": 1, "return_token_ids": True, **options}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == tokens


def test_special_tokens_in_a_text(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "</s>a"}).json()["tokens"]
    assert tokens[0] == 1
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "</s>a"}


def test_no_tokens(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@settings(max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_back_and_forth(http: httpx.Client, text: str) -> None:
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "a", "x": 1}).headers["x-ignored-fields"] == "x"
    assert http.post("/detokenize", json={"tokens": [5], "y": 1}).headers["x-ignored-fields"] == "y"


def test_special_tokens_by_name(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").json() == {"bos_token": "<s>", "eos_token": "</s>"}
