"""Log lines, plain or JSON: each event is one that nothing in a request can forge."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

from loadproof.server.log_writer import LogWriter
from loadproof.server.settings import ServerConfig

# What would end a line, move the cursor, reorder the text, or not be text at all.
_UNSAFE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ud800-\\udfff]"
)
_BARE = re.compile(r"[A-Za-z0-9_./:%@+,~*()\[\]{}-]+")
_FIELDS = "loadproof_fields"


def configure_logging(config: ServerConfig) -> None:
    """Write what the process logs to standard error, as ``config`` wants it, without ever waiting for it.

    Of other packages but uvicorn only warnings and worse are shown. Calling it again replaces what it set.
    """
    level = config.log_level.upper()
    root = logging.getLogger()
    flush_logs()
    for handler in _writers():
        root.removeHandler(handler)
        handler.close()
    handler = LogWriter(sys.stderr, dropped_fields=lambda count: with_fields({"lines": count}))
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else PlainFormatter())
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    for name in ("loadproof", "uvicorn"):
        logging.getLogger(name).setLevel(level)


def flush_logs() -> None:
    """Wait, but not for long, until what was logged is written."""
    for handler in _writers():
        handler.flush()


def _writers() -> list[LogWriter]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LogWriter)]


def with_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """What a logging call takes as ``extra`` for its line to have these fields; None's are left out."""
    return {_FIELDS: {name: value for name, value in fields.items() if value is not None}}


class PlainFormatter(logging.Formatter):
    """``TIME LEVEL MESSAGE name=value ...``; a traceback follows, each of its lines marked as such."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        words = [_time(record), f"{record.levelname:<7}", _safe(record.getMessage())]
        words += [f"{name}={_plain(value)}" for name, value in _fields_of(record).items()]
        lines = [f"  | {_safe(line)}" for line in _trace(record).splitlines()]
        return "\n".join((" ".join(words), *lines))


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message``, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        event: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace = _trace(record)
        if trace:
            event["exception"] = trace
        fields = {name: _jsonable(value) for name, value in _fields_of(record).items()}
        return json.dumps(event | {name: fields[name] for name in fields if name not in event})


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _trace(record: logging.LogRecord) -> str:
    """The traceback that goes with a record, if any."""
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _safe(text: str) -> str:
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode(), text)


def _plain(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _jsonable(value: object) -> object:
    """A number, truth or text; JSON knows neither infinity nor NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int | str) else str(value)
