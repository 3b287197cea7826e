"""The page's files as a browser gets them, and ``/engine``."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any, TypeVar

import httpx
import pytest
from tests.server.gate import slowed
from tests.server.running import MODEL_NAME, PATIENCE, MakeServer, Running

T = TypeVar("T")
POLICY_PARTS = ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'")


class Links(HTMLParser):
    """Names of files that a page wants, and what a strict policy forbids it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.forbidden: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names += [value for name in ("src", "href") if (value := given.get(name)) is not None]
        self.forbidden += [name for name in given if name == "style" or name.startswith("on")]
        self._in_script = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._in_script and data.strip():
            self.forbidden.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False


def wanted_files(http: httpx.Client) -> list[str]:
    """Addresses of all files that the page asks for, modules that modules import included."""
    wanted = Links(http.get("/").text).names
    for name in wanted:
        for module in re.findall(r'from "\./([^"]+)"|import "\./([^"]+)"', http.get(f"/{name}").text):
            path = f"page/{''.join(module)}"
            if path not in wanted:
                wanted.append(path)
    return wanted


def test_the_page(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.startswith("<!doctype html>")


def test_all_that_the_page_wants_is_here_and_nothing_else(http: httpx.Client) -> None:
    wanted = wanted_files(http)
    for name in wanted:
        assert re.fullmatch(r"page/[a-z]+\.(css|js|svg)", name), "it asks somewhere else"
        assert http.get(f"/{name}").status_code == 200, name
    kept = {f"page/{entry.name}" for entry in (files("loadproof.server") / "page").iterdir()}
    assert kept - {"page/index.html"} == set(wanted)


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("page.css", "text/css; charset=utf-8"),
        ("page.js", "text/javascript; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_media_types(http: httpx.Client, name: str, media_type: str) -> None:
    assert http.get(f"/page/{name}").headers["content-type"] == media_type


@pytest.mark.parametrize("path", ["/", "/page/page.js"])
def test_the_policy_is_strict(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers
    policy = headers["content-security-policy"].split("; ")
    assert set(POLICY_PARTS) <= set(policy)
    assert not any("unsafe" in part or "*" in part or "http" in part for part in policy)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_page_keeps_to_its_policy(http: httpx.Client) -> None:
    assert Links(http.get("/").text).forbidden == []


@pytest.mark.parametrize("name", ["none.js", "index.htm", "..%2froutes%2fpage.py", "%2e%2e", "..%5cserve.py"])
def test_no_other_file_can_be_had(http: httpx.Client, name: str) -> None:
    answer = http.get(f"/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/engine"])
def test_keys_guard_it(make_server: MakeServer, path: str) -> None:
    http = make_server(api_keys=("one", "two")).http()
    refused = http.get(path)
    assert refused.status_code == 401
    assert "Basic" in refused.headers["www-authenticate"]
    assert http.get(path, auth=("anybody", "two")).status_code == 200
    assert http.get(path, auth=("anybody", "three")).status_code == 401


def test_only_the_engines_picture_is_in_the_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert {"/", "/page/{name}"}.isdisjoint(document["paths"])
    answers = document["paths"]["/engine"]["get"]["responses"]
    assert answers["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/EngineView")
    assert {"401", "500", "503"} <= answers.keys()


def until(look: Callable[[], T], seen: Callable[[T], bool]) -> T:
    """What ``look`` finds once it is what was waited for."""
    end = time.monotonic() + PATIENCE
    while not seen(found := look()):
        assert time.monotonic() < end, found
    return found


def engine_view(served: Running) -> dict[str, Any]:
    view: dict[str, Any] = served.http().get("/engine").json()
    return view


def test_an_idle_engine(make_server: MakeServer) -> None:
    served = make_server(num_blocks_override=40)
    view = engine_view(served)
    assert (view["model"], view["max_model_len"]) == (MODEL_NAME, 256)
    assert view["system_fingerprint"] == served.llm.system_fingerprint
    assert view["blocks"] == {"total": 40, "held": 0, "cached": 0, "blank": 40}
    assert (view["num_running"], view["num_waiting"], view["sequences"], view["num_left_out"]) == (
        0,
        0,
        [],
        0,
    )
    assert set(view["counters"].values()) == {0}


def test_what_was_computed_stays_cached(make_server: MakeServer) -> None:
    served = make_server(num_blocks_override=40)
    body = {"prompt": list(range(2, 102)), "max_tokens": 1, "temperature": 0}
    for _ in range(2):
        assert served.http().post("/v1/completions", json=body).status_code == 200
    view = engine_view(served)
    size = view["block_size"]
    assert view["blocks"] == {"total": 40, "held": 0, "cached": 100 // size, "blank": 40 - 100 // size}
    assert view["counters"]["prompt_tokens"] == 200
    assert view["counters"]["generation_tokens"] == view["counters"]["num_finished"] == 2
    assert view["counters"]["prefix_cache_hits"] == 100 // size * size
    assert served.wait_until_idle()["num_blank_blocks"] == view["blocks"]["blank"]


def test_time_goes_on(http: httpx.Client) -> None:
    times = [http.get("/engine").json()["time"] for _ in range(3)]
    assert times == sorted(times)


@contextmanager
def answering(served: Running, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What ``/engine`` says while the request is answered, for longer than anyone looks; cut then."""
    http = served.http()
    body = {"prompt": list(range(2, 52)), "max_tokens": 200, "ignore_eos": True, "stream": True} | body
    with slowed(served.llm), http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        yield until(lambda: engine_view(served), lambda view: bool(view["num_running"]))
    served.wait_until_idle()


def test_running_and_waiting_sequences(make_server: MakeServer) -> None:
    """Of three, one runs at a time: the list begins with it."""
    served = make_server(max_num_seqs=1, num_blocks_override=40)
    with answering(served, {"n": 3}) as view:
        assert [one["status"] for one in view["sequences"]] == ["running", "waiting", "waiting"]
        assert [one["index"] for one in view["sequences"]] == [0, 1, 2]
        first, second, _ = view["sequences"]
        assert (first["num_prompt_tokens"], first["max_tokens"]) == (50, 200)
        assert view["blocks"]["held"] == first["num_blocks"] > 0
        assert second["num_blocks"] == second["num_output_tokens"] == 0
        assert view["blocks"]["held"] + view["blocks"]["cached"] + view["blocks"]["blank"] == 40
    assert engine_view(served)["sequences"] == []


def test_a_long_list_is_cut(make_server: MakeServer) -> None:
    served = make_server(max_num_seqs=2)
    with answering(served, {"n": 120}) as view:
        assert len(view["sequences"]) == 100
        assert view["num_left_out"] == view["num_running"] + view["num_waiting"] - 100 == 20
        assert view["sequences"][0]["status"] == "running"


def test_an_engine_that_does_not_answer(make_server: MakeServer) -> None:
    served = make_server(health_timeout=0.05)
    stuck = threading.Event()

    def wait(*_: object) -> None:
        stuck.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        served.llm.on_logits(wait)
        answer = pool.submit(served.http().post, "/v1/completions", json={"prompt": [2], "max_tokens": 1})
        refused = until(lambda: served.http().get("/engine"), lambda got: got.status_code != 200)
        stuck.set()
        assert answer.result().status_code == 200
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "The engine does not answer."
