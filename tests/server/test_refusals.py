"""Requests that are odd rather than wrong: lone surrogates, HEAD, slashes; and faults of the server's own."""

from __future__ import annotations

import json

import httpx
import pytest
from tests.server.running import MakeServer, Running

HI = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"\ud800": 2}}),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"\udfff": 1, "role": "user"}]}),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"\ud800": 1}}),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "\ud800"}}),
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "\ud800": 1}),
    ],
)
def test_lone_surrogates_are_refused_as_anything_is(
    http: httpx.Client, strict: httpx.Client, path: str, body: object, is_strict: bool
) -> None:
    answer = (strict if is_strict else http).post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


def test_a_name_with_a_lone_surrogate_is_told_so(http: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = http.post(path, content=b'{"prompt": "a", "\\ud800": 1}', headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            "The body has a name with a lone surrogate, which is no Unicode text."
        )


@pytest.mark.parametrize("dead", [False, True])
def test_a_fault_of_the_server_is_not_said_to_be_the_engines(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    served = make_server()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("loadproof.server.routes.models._card", broken)
    if dead:
        monkeypatch.setattr(served.app.state.server.engine, "failure", RuntimeError("gone"))
    answer = served.http().get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == ("engine_dead" if dead else "internal_error")
    head = served.http().head("/v1/models")
    assert (head.status_code, head.content) == (500, b"")


@pytest.mark.parametrize(
    "path",
    ["/health", "/", "/version", "/v1/models", "/v1/models/tiny", "/engine", "/openapi.json", "/nothing"],
)
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert http.get("/health").json() == {"status": "ok"}  # over the same connection


def test_head_is_not_post(http: httpx.Client) -> None:
    assert http.head("/v1/completions").status_code == 405


def test_head_is_counted_as_itself(make_server: MakeServer) -> None:
    http = make_server().http()
    http.head("/version")
    lines = [line for line in http.get("/metrics").text.splitlines() if 'handler="/version"' in line]
    assert any("http_requests_total{" in line and 'method="HEAD"' in line for line in lines)


def test_head_is_not_in_the_document(server: Running) -> None:
    methods = {method for path in server.app.openapi()["paths"].values() for method in path}
    assert methods == {"get", "post"}


@pytest.mark.parametrize("path", ["/health/", "/v1/completions/", "/v1/models/"])
def test_a_slash_too_many_leads_nowhere(http: httpx.Client, path: str) -> None:
    answer = http.get(path, follow_redirects=False)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("not_found", "model_not_found")
