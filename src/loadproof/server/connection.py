"""HTTP connections that wait no longer than they must, and say what is wrong with what came."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import h11

from loadproof.server.errors import ApiError
from loadproof.server.slow_readers import ReadAnswers

_HEADER_SIZE = 64 << 10  # unless uvicorn is told otherwise
_READING = frozenset({h11.IDLE, h11.SEND_BODY})
_CAN_ANSWER = frozenset({h11.IDLE, h11.SEND_RESPONSE})
_URL = re.compile(rb"https?://(?P<host>[^/?]*)(?P<path>.*)", re.IGNORECASE)


class _LimitedHttp(h11.Connection):
    """Measures headers that came all at once too; h11 does only those that come in parts.

    A request that says its length in two ways is refused: a proxy that believes the other one would take
    the body's end for the next request. A whole URL as the target is served as its path.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(h11.SERVER, limit)
        self._limit = limit

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if _head_size(event) > self._limit:
            raise h11.RemoteProtocolError("headers are too large", error_status_hint=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return _with_path(event)


class Connection(ReadAnswers):
    """One connection: a whole request must come within ``read_timeout`` seconds, or it is closed.

    The time counts from the connection's start or the request's first byte, its body included. Between
    requests an idle connection is uvicorn's to close.
    """

    read_timeout = 60.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        self.conn = _LimitedHttp(self.config.h11_max_incomplete_event_size or _HEADER_SIZE)
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; stop the clock where the request is whole, start it where another begins."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Stop the clock, which an answer that came before its request's end has left running."""
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too long, in the shape of all errors; close where no answer fits."""
        if self.conn.our_state not in _CAN_ANSWER:
            self.transport.close()
            return
        refusal = _refusal(sys.exc_info()[1], msg)
        body = json.dumps(refusal.content()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
        if self.cycle is not None:  # the request that began well: its own answer would be a second one
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: some clients offer HTTP/2 with every request, and may be answered in HTTP/1.1."""

    def _watch(self) -> None:
        if self.transport.is_closing() or not self._is_reading():
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.read_timeout, self._give_up)

    def _is_reading(self) -> bool:
        # Between requests, what has come already is the next one's beginning.
        begun = self.timeout_keep_alive_task is None or self.conn.trailing_data[0]
        return self.conn.their_state in _READING and bool(begun)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self.transport.abort()


def connections_within(seconds: float) -> type[Connection]:
    """Connections with this ``read_timeout``."""

    class Timed(Connection):
        read_timeout = seconds

    return Timed


def _with_path(request: h11.Request) -> h11.Request:
    """The request with a path as its target; a URL's host goes before the header's."""
    url = _URL.fullmatch(request.target)
    if url is None:
        return request
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=b"/" + url["path"].removeprefix(b"/"),
        headers=[(b"host", url["host"]), *headers],
        http_version=request.http_version,
    )


def _head_size(request: h11.Request) -> int:
    """Bytes of a request's first line and its headers, as they are usually written."""
    lines = sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers.raw_items())
    return len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n\r\n") + lines


def _refusal(error: BaseException | None, message: str) -> ApiError:
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        return ApiError(431, "The request's headers are too large.", code="headers_too_large")
    return ApiError(400, message, code="invalid_http")
