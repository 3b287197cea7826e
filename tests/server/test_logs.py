"""Log lines: how they look, that nothing forges one, and what is said of requests and of the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.running import MODEL_NAME, PATIENCE, MakeServer, Running

from loadproof.server import engine_log
from loadproof.server.async_engine import AsyncEngine
from loadproof.server.engine_log import activity, log_engine
from loadproof.server.errors import engine_failed
from loadproof.server.logs import JsonFormatter, PlainFormatter, configure_logging, with_fields
from loadproof.server.settings import ServerConfig

TEXTS = st.text(max_size=30) | st.sampled_from(
    ["a\nb", "a\r\nb", "\x1b[2J", "\u2028", "\u202e", "\ud800", "\x85", '"', "\\", "\x00", ""]
)
VALUES = TEXTS | st.integers() | st.floats() | st.booleans()


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undo what :func:`configure_logging` does."""
    root = logging.getLogger()
    handlers, names = root.handlers[:], ("", "loadproof", "uvicorn")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


Accesses = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def accesses(caplog: pytest.LogCaptureFixture) -> Accesses:
    """The fields of the access log's lines, once there are so many; clients may have their answers before."""
    caplog.set_level(logging.DEBUG, "loadproof.access")

    def read(count: int) -> list[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        records: list[logging.LogRecord] = []
        while len(records) < count and time.monotonic() < end:
            time.sleep(0.002)
            records = [record for record in caplog.records if record.name == "loadproof.access"]
        assert len(records) == count
        return [{**vars(record)["loadproof_fields"], "level": record.levelname} for record in records]

    return read


def record_of(message: str, fields: dict[str, Any] | None = None, **more: Any) -> logging.LogRecord:
    logger = logging.getLogger("loadproof.test")
    return logger.makeRecord(
        logger.name,
        logging.INFO,
        "here",
        1,
        message,
        (),
        more.get("exc_info"),
        extra=with_fields(fields or {}),
    )


def printable(line: str) -> bool:
    return all(letter.isprintable() or letter == " " for letter in line)


# How lines look.


@pytest.mark.usefixtures("logging_as_before")
def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig())
    logging.getLogger("loadproof.test").info("%s is up", "it", extra=with_fields({"port": 80, "no": None}))
    logging.getLogger("uvicorn.error").warning("odd")
    first, second = capsys.readouterr().err.splitlines()
    assert first.split(maxsplit=1)[1] == "INFO    it is up port=80"
    assert second.split(maxsplit=1)[1] == "WARNING odd"


@pytest.mark.usefixtures("logging_as_before")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig(log_format="json"))
    logging.getLogger("loadproof.test").info("%s is up", "it", extra=with_fields({"port": 80, "no": None}))
    logging.getLogger("uvicorn.error").warning("odd")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    time = first.pop("time")
    assert (time[10], time[-1], len(time)) == ("T", "Z", len("2026-01-01T00:00:00.000Z"))
    assert first == {"level": "info", "logger": "loadproof.test", "message": "it is up", "port": 80}
    assert (second["level"], second["logger"], second["message"]) == ("warning", "uvicorn.error", "odd")


@pytest.mark.usefixtures("logging_as_before")
def test_times_are_utc() -> None:
    record = record_of("x")
    record.created = 0.25
    assert PlainFormatter().format(record) == "1970-01-01T00:00:00.250Z INFO    x"
    assert json.loads(JsonFormatter().format(record))["time"] == "1970-01-01T00:00:00.250Z"


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["debug", "info", "warning", "error", "other warning", "other error"]),
        ("info", ["info", "warning", "error", "other warning", "other error"]),
        ("warning", ["warning", "error", "other warning", "other error"]),
        ("error", ["error", "other error"]),
    ],
)
def test_levels(level: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig(log_level=level))
    ours, others = logging.getLogger("loadproof.test"), logging.getLogger("other")
    for name in ("debug", "info", "warning", "error"):
        getattr(ours, name)(name)
    for name in ("debug", "info", "warning", "error"):
        getattr(others, name)(f"other {name}")
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().err.splitlines()] == shown


@pytest.mark.usefixtures("logging_as_before")
def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig(log_level="debug"))
    configure_logging(ServerConfig(log_format="json"))
    logging.getLogger("loadproof.test").debug("gone")
    logging.getLogger("loadproof.test").info("once")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "once"


# What can't be forged.


@given(TEXTS, st.dictionaries(st.from_regex("[a-z_]+", fullmatch=True), VALUES, max_size=3))
def test_a_plain_event_is_one_line(message: str, fields: dict[str, Any]) -> None:
    line = PlainFormatter().format(record_of(message.replace("%", ""), fields))
    assert len(line.splitlines()) == 1
    assert line.encode()
    assert "\x1b" not in line


@given(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3))
def test_a_json_event_is_one_object(message: str, fields: dict[str, Any]) -> None:
    line = JsonFormatter().format(record_of(message.replace("%", ""), fields))
    assert len(line.splitlines()) == 1
    event = json.loads(line, parse_constant=pytest.fail)
    assert event["message"] == message.replace("%", "")
    for name, value in fields.items():
        if name not in ("time", "level", "logger", "message"):
            finite = not isinstance(value, float) or math.isfinite(value)
            assert event[name] == (value if finite else str(value))


def test_fields_do_not_take_the_place_of_the_events_own() -> None:
    fields = {"level": "critical", "logger": "x", "message": "y", "time": "z"}
    event = json.loads(JsonFormatter().format(record_of("it", fields)))
    assert (event["level"], event["logger"], event["message"]) == ("info", "loadproof.test", "it")


def test_values_with_spaces_are_quoted() -> None:
    line = PlainFormatter().format(record_of("x", {"a": "b status=200", "c": '"'}))
    assert line.endswith('x a="b status=200" c="\\""')


def test_a_traceback_can_not_look_like_lines_of_the_log() -> None:
    try:
        raise ValueError("bad\n2026-01-01T00:00:00.000Z INFO    forged\x1b[2J")
    except ValueError:
        record = record_of("it broke", exc_info=sys.exc_info())
    first, *rest = PlainFormatter().format(record).split("\n")
    assert first.endswith("INFO    it broke")
    assert all(line.startswith("  | ") and printable(line) for line in rest)
    assert any(line.startswith("  | 2026-01-01T00:00:00.000Z INFO    forged") for line in rest)
    event = json.loads(JsonFormatter().format(record))
    assert event["exception"].splitlines()[-1].startswith("2026-01-01T00:00:00.000Z INFO    forged")


def ask_raw(served: Running, head: bytes) -> bytes:
    with socket.create_connection(served.address, timeout=PATIENCE) as connection:
        connection.sendall(head + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_hostile_path(server: Running, accesses: Accesses) -> None:
    target = b"/a%0a2026%20INFO%e2%80%a8%ff%1b[2J" + b"x" * 2000 + b"?key=secret"
    assert ask_raw(server, b"GET " + target + b" HTTP/1.1").startswith(b"HTTP/1.1 404")
    (line,) = accesses(1)
    assert line["path"].startswith("/a%0A2026%20INFO%E2%80%A8")
    assert line["path"].isascii()
    assert line["path"].isprintable()
    assert len(line["path"]) < 3 * 512
    assert "secret" not in str(line)


# The access log.


def test_a_generations_line(server: Running, accesses: Accesses) -> None:
    http = server.http()
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "n": 2}
    http.post("/v1/completions?key=x", json=body)
    with http.stream("POST", "/v1/completions", json={**body, "stream": True, "n": 1}) as answer:
        answer.read()
    whole, streamed = accesses(2)
    for line, num_tokens in ((whole, 8), (streamed, 4)):
        assert (line["level"], line["method"], line["path"]) == ("INFO", "POST", "/v1/completions")
        assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (200, 3, num_tokens)
        assert line["client"].startswith("127.0.0.1:")
        assert line["seconds"] > 0
        assert not {"cut_off", "error"} & line.keys()


def test_a_stream_that_the_client_leaves(server: Running, accesses: Accesses, no_leak: None) -> None:
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with server.http().stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    (line,) = accesses(1)
    assert (line["status"], line["cut_off"], line["prompt_tokens"]) == (200, True, 1)
    assert "completion_tokens" not in line


def test_a_stream_that_the_server_cuts_off(
    make_server: MakeServer, accesses: Accesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_server()
    step, steps = served.llm.engine.step, iter(range(1000))

    def failing() -> None:
        if next(steps) > 5:
            raise RuntimeError("broken")
        step()

    monkeypatch.setattr(served.llm.engine, "step", failing)
    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with served.http().stream("POST", "/v1/completions", json=body) as answer:
        assert b"engine_dead" in answer.read()
    (line,) = accesses(1)
    assert (line["status"], line["error"]) == (200, "engine_dead")


def test_refusals_have_lines(server: Running, accesses: Accesses) -> None:
    http = server.http()
    http.get("/nowhere")
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
    http.get("/version", headers={"host": "example.org"})
    assert [line["status"] for line in accesses(3)] == [404, 400, 403]


def test_machines_that_look_after_the_server_are_quiet(server: Running, accesses: Accesses) -> None:
    for path in ("/health", "/metrics", "/version"):
        server.http().get(path)
    server.http().post("/health")
    assert [(line["path"], line["level"]) for line in accesses(4)] == [
        ("/health", "DEBUG"),
        ("/metrics", "DEBUG"),
        ("/version", "INFO"),
        ("/health", "INFO"),
    ]


def test_without_an_access_log(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "loadproof.access")
    http = make_server(access_log=False).http()
    for _ in range(2):  # with the second answer the first request is over
        assert http.get("/version").headers["x-request-id"]
    assert [record for record in caplog.records if record.name == "loadproof.access"] == []


# Request ids.


@pytest.mark.parametrize("given_id", ["a", "trace-1/2:3", "with space", "x" * 128, "~!\"'"])
def test_a_sane_request_id_is_kept(given_id: str, http: httpx.Client, accesses: Accesses) -> None:
    answer = http.get("/version", headers={"x-request-id": given_id})
    assert answer.headers["x-request-id"] == given_id
    assert [line["request_id"] for line in accesses(1)] == [given_id]


@pytest.mark.parametrize("given_id", [b"", b"x" * 129, b"a\tb", "\u00e9".encode(), b"\xff", b"a\x7fb"])
def test_any_other_is_replaced(given_id: bytes, http: httpx.Client) -> None:
    headers = [(b"x-request-id", given_id)]
    made = {http.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for one in made:
        assert len(one) == 32
        int(one, 16)


def test_errors_are_named_too(make_server: MakeServer, http: httpx.Client) -> None:
    served = make_server(api_keys=("secret",))
    mine = {"x-request-id": "mine"}
    assert served.http().get("/version", headers=mine).headers["x-request-id"] == "mine"
    assert http.get("/nowhere", headers=mine).headers["x-request-id"] == "mine"


def test_an_answer_to_a_fault_of_the_servers(
    make_server: MakeServer,
    accesses: Accesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = make_server()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("loadproof.server.routes.models._card", broken)
    answer = served.http().get("/v1/models", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "a bug" not in answer.text
    (line,) = accesses(1)
    assert (line["status"], line["error"], line["request_id"]) == (500, "500", "mine")


def test_openais_client_reads_the_id(server: Running) -> None:
    completion = server.openai(default_headers={"x-request-id": "mine"}).completions.create(
        model=MODEL_NAME, prompt="x", max_tokens=1
    )
    assert completion._request_id == "mine"


# The engine's line.

IDLE = {
    "prompt_tokens": 100,
    "generation_tokens": 1000,
    "prefix_cache_queries": 100,
    "prefix_cache_hits": 50,
    "num_preemptions": 3,
    "num_running": 0,
    "num_waiting": 0,
    "num_blocks": 8,
    "num_free_blocks": 8,
}


def test_no_work_no_line() -> None:
    assert activity(IDLE, IDLE, 10.0) == {}


def test_what_was_done_since() -> None:
    after = IDLE | {
        "prompt_tokens": 150,
        "generation_tokens": 1085,
        "prefix_cache_queries": 140,
        "prefix_cache_hits": 60,
        "num_running": 2,
        "num_waiting": 1,
        "num_free_blocks": 2,
        "num_preemptions": 4,
    }
    assert activity(IDLE, after, 10.0) == {
        "prompt_tokens_per_second": 5.0,
        "generation_tokens_per_second": 8.5,
        "running": 2,
        "waiting": 1,
        "kv_cache_usage": 0.75,
        "prefix_cache_hit_rate": 0.25,
        "preemptions": 1,
    }


@pytest.mark.parametrize("busy", ["num_running", "num_waiting"])
def test_work_without_progress_has_a_line(busy: str) -> None:
    fields = activity(IDLE, IDLE | {busy: 1}, 10.0)
    assert fields["generation_tokens_per_second"] == 0.0
    assert fields["prefix_cache_hit_rate"] is None


class ScriptedEngine:
    """Answers each look with the next of these, or raises it; then it has died."""

    def __init__(self, *answers: dict[str, int] | Exception) -> None:
        self.answers = list(answers)

    async def call(self, *_: object) -> dict[str, int]:
        answer = self.answers.pop(0) if self.answers else engine_failed()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_lines_while_there_is_work(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(engine_log, "INTERVAL", 0.001)
    caplog.set_level(logging.INFO, "loadproof.engine")
    busy = IDLE | {"num_running": 1}
    engine = ScriptedEngine(IDLE, busy, TimeoutError(), busy, IDLE, IDLE)
    asyncio.run(log_engine(cast(AsyncEngine, engine)))
    lines = [record.getMessage() for record in caplog.records if record.name == "loadproof.engine"]
    assert lines == ["engine", "the engine does not answer", "engine"]


def test_a_server_logs_what_its_engine_does(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_log, "INTERVAL", 0.01)
    caplog.set_level(logging.INFO, "loadproof.engine")
    served = make_server()

    def seen() -> bool:
        return any(record.getMessage() == "engine" for record in caplog.records)

    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}
    http = served.http()
    assert http.post("/v1/completions", json=body).is_success
    served.wait_for(lambda _: seen())
