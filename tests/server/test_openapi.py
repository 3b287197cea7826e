"""The OpenAPI document holds, for data that fits it and for data that doesn't: Schemathesis asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.server.running import MakeServer, Running

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POSTS = {
    "POST /v1/completions": 15,
    "POST /v1/chat/completions": 12,
    "POST /v1/score": 15,
    "POST /tokenize": 8,
    "POST /detokenize": 15,
}
GETS = {
    "GET /v1/models": 1,
    "GET /v1/models/{model}": 5,
    "GET /version": 1,
    "GET /health": 1,
    "GET /metrics": 1,
    "GET /tokenizer_info": 1,
}
"""How many requests each of them gets; those of POST of either kind, for to GET nothing can be wrong."""
CASES = [
    *((label, GenerationMode.POSITIVE, count) for label, count in (POSTS | GETS).items()),
    *((label, GenerationMode.NEGATIVE, count) for label, count in POSTS.items()),
]
HI = [{"role": "user", "content": "Hi"}]
RICH = {"n": 2, "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True, "seed": 1}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("POST /v1/completions", {"prompt": "a", **RICH, "logprobs": 2, "echo": True}),
    ("POST /v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("POST /v1/completions", {"prompt": "a", "max_tokens": 9, "stop_token_ids": list(range(2, 200))}),
    ("POST /v1/completions", {"prompt": "a", **RICH, "stream": True}),
    ("POST /v1/chat/completions", {"messages": HI, **RICH, "logprobs": True, "top_logprobs": 2}),
    ("POST /v1/chat/completions", {"messages": HI, "max_tokens": 1}),
    ("POST /v1/chat/completions", {"messages": HI, **RICH, "stream": True}),
    ("POST /v1/score", {"context": "a", "continuations": ["b", [5]]}),
    ("POST /tokenize", {"messages": HI, "return_token_strs": True}),
    ("POST /detokenize", {"tokens": [5]}),
]


@pytest.fixture(scope="module")
def short_server(make_server: MakeServer) -> Iterator[Running]:
    """Whatever is asked of it takes few tokens, and little time."""
    served = make_server(max_model_len=64, check_integrity=False)
    yield served
    served.check_no_leak()


@pytest.fixture(scope="module")
def operations(short_server: Running) -> dict[str, Any]:
    """The documented operations by method and path."""
    schema = schemathesis.openapi.from_url(f"{short_server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return {operation.label: operation for operation in found}


def test_every_operation_that_takes_a_body_is_asked(operations: dict[str, Any]) -> None:
    assert {label for label in operations if label.startswith("POST")} == set(POSTS)
    assert set(GETS) <= set(operations)


@pytest.mark.parametrize(("label", "mode", "count"), CASES, ids=lambda value: str(value).rpartition(".")[2])
def test_every_answer_is_as_documented(
    operations: dict[str, Any], short_server: Running, label: str, mode: GenerationMode, count: int
) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operations[label].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # but for one name all are unknown
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    check()
    if mode == GenerationMode.NEGATIVE:
        assert 400 in statuses
    assert short_server.http().get("/health").status_code == 200


@pytest.mark.parametrize(("label", "body"), SERVED)
def test_what_is_served_is_as_documented(
    operations: dict[str, Any], label: str, body: dict[str, Any]
) -> None:
    case = operations[label].Case(body=body, media_type="application/json")
    assert case.call_and_validate(checks=CHECKS).status_code == 200
