"""``/v1/score``: the scores are those of :meth:`LLM.score`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import httpx
import pytest
from tests.server.running import MakeServer

from loadproof import LLM

PATH = "/v1/score"
pytestmark = pytest.mark.usefixtures("no_leak")

CASES: list[tuple[Any, list[Any]]] = [
    ("The sky is", [" blue", " green", " a lie"]),
    ("The sky is ", ["blue"]),
    ("", ["blue sky"]),
    ([5, 6, 7], [[8, 9], [10]]),
    ("The sky is", [[8, 9], " blue"]),
    ("naïve 日本 ", ["😀", "x"]),
]


@pytest.mark.parametrize(("context", "continuations"), CASES)
def test_the_scores_are_those_in_python(
    http: httpx.Client, reference: LLM, context: Any, continuations: list[Any]
) -> None:
    answer = http.post(PATH, json={"context": context, "continuations": continuations}).json()
    expected = reference.score(context, continuations, use_tqdm=False)
    for index, (score, one) in enumerate(zip(answer["scores"], expected, strict=True)):
        fields = {**asdict(one), "num_tokens": one.num_tokens, "index": index}
        assert score == {**fields, "token_ids": [*one.token_ids], "token_logprobs": [*one.token_logprobs]}
    assert answer["object"] == "score"
    assert answer["system_fingerprint"] == reference.system_fingerprint
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] > sum(score["num_tokens"] for score in answer["scores"])


def test_a_greedy_continuation_is_told(http: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    best = choice["token_ids"]
    other = [*best[:2], (best[2] + 1) % 200]
    scores = http.post(PATH, json={"context": [5, 6, 7], "continuations": [best, other]}).json()["scores"]
    assert [score["is_greedy"] for score in scores] == [True, False]


def test_a_long_context_is_cut_where_that_is_wanted(http: httpx.Client) -> None:
    """By a field of its own, which is false where it is null."""
    body = {"context": "x" * 300, "continuations": ["yz"]}
    for fields in ({}, {"truncate_context": None}):
        refused = http.post(PATH, json=body | fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "300 tokens of context and 2 to score; at most 255 fit" in refused.json()["error"]["message"]
    (score,) = http.post(PATH, json={**body, "truncate_context": True}).json()["scores"]
    assert score["num_dropped"] == 47


def test_what_is_shared_is_cached(make_server: MakeServer) -> None:
    http = make_server(block_size=16).http()
    body = {"context": "x" * 100, "continuations": ["a", "b"], "cache_salt": "s"}
    first, second = (http.post(PATH, json=body).json() for _ in range(2))
    assert second["scores"] == first["scores"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


def test_scores_need_logprobs(make_server: MakeServer) -> None:
    answer = (
        make_server(logprobs_mode="raw_logits")
        .http()
        .post(PATH, json={"context": "a", "continuations": ["b"]})
    )
    assert answer.status_code == 400
    assert "logprobs_mode is raw_logits" in answer.json()["error"]["message"]
