"""Log lines: how they look, and that nothing forges one."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadproof.server.logs import JsonFormatter, PlainFormatter, configure_logging, flush_logs, with_fields
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
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


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


def logged(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that were written to standard error."""
    flush_logs()
    return capsys.readouterr().err.splitlines()


def printable(line: str) -> bool:
    return all(letter.isprintable() or letter == " " for letter in line)


# How lines look.


@pytest.mark.usefixtures("logging_as_before")
def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig())
    logging.getLogger("loadproof.test").info("%s is up", "it", extra=with_fields({"port": 80, "no": None}))
    logging.getLogger("uvicorn.error").warning("odd")
    first, second = logged(capsys)
    assert first.split(maxsplit=1)[1] == "INFO    it is up port=80"
    assert second.split(maxsplit=1)[1] == "WARNING odd"


@pytest.mark.usefixtures("logging_as_before")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig(log_format="json"))
    logging.getLogger("loadproof.test").info("%s is up", "it", extra=with_fields({"port": 80, "no": None}))
    logging.getLogger("uvicorn.error").warning("odd")
    first, second = map(json.loads, logged(capsys))
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
    assert [line.split(maxsplit=2)[2] for line in logged(capsys)] == shown


@pytest.mark.usefixtures("logging_as_before")
def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig(log_level="debug"))
    configure_logging(ServerConfig(log_format="json"))
    logging.getLogger("loadproof.test").debug("gone")
    logging.getLogger("loadproof.test").info("once")
    (line,) = logged(capsys)
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
