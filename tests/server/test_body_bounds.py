"""Bodies hold up everyone while they are read: how large they and the lists in them may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.running import MakeServer, Running

JSON = {"content-type": "application/json"}
MOST = 1 << 20
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/completions", {"prompt": [None]}, "prompt[0]"),
    ("/v1/score", {"context": None, "continuations": ["a"]}, "context"),
    ("/v1/score", {"context": "a", "continuations": [None]}, "continuations[0]"),
    ("/detokenize", {"tokens": None}, "tokens"),
]


@pytest.fixture(scope="module")
def roomy(make_server: MakeServer) -> Running:
    """A server that takes larger bodies."""
    return make_server(max_body_size=4 << 20)


@pytest.mark.parametrize(("path", "body", "param"), CALLS, ids=lambda value: str(value)[:30])
def test_lists_of_ids_end_somewhere(roomy: Running, path: str, body: dict[str, Any], param: str) -> None:
    ids = "[" + "5," * MOST + "5]"
    answer = roomy.http().post(path, content=json.dumps(body).replace("null", ids), headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"] == f"{param} has more than {MOST} entries"


def test_two_mebibytes_unless_told_otherwise(server: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    http = server.http()
    assert http.post("/v1/completions", content=body.ljust(2 << 20), headers=JSON).status_code == 200
    answer = http.post("/v1/completions", content=body.ljust((2 << 20) + 1), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
