"""The outermost middleware: names each request, and tells of it when it is over."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loadproof.server.logs import with_fields
from loadproof.server.request_record import (
    NO_ANSWER,
    REQUEST_ID_HEADER,
    UNROUTED,
    RequestRecord,
    current_record,
)

_log = logging.getLogger("loadproof.access")
_MAX_ID = 128
_MAX_PATH = 512
# Asked for every few seconds by machines: they would bury the rest.
_QUIET = frozenset({"/health", "/metrics", "/engine"})


class AccessMiddleware:
    """Gives each request a :class:`RequestRecord`, and each of ``listeners`` that once the request is over.

    The request's id is its own ``x-request-id`` where that is printable ASCII of sane length, and made up
    otherwise; the answer has it too.
    """

    def __init__(self, app: ASGIApp, listeners: Sequence[Callable[[RequestRecord], None]]) -> None:
        self._app = app
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _record_of(scope)
        token = current_record.set(record)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.complete = True

        try:
            await self._app(scope, receive, sending)
        except Exception:
            # Whoever is outside of all middlewares answers it, if nothing has been yet.
            record.status = record.status or 500
            raise
        finally:
            current_record.reset(token)
            self._finish(record, scope)

    def _finish(self, record: RequestRecord, scope: Scope) -> None:
        record.seconds = time.perf_counter() - record.began
        record.handler = getattr(scope.get("route"), "path", UNROUTED)
        for listener in self._listeners:
            listener(record)


def log_access(record: RequestRecord) -> None:
    """Log a line about a request; of those that only look after the server, where something is wrong."""
    status = record.status or NO_ANSWER
    quiet = record.handler in _QUIET and status < 400
    fields = {
        "method": record.method,
        "path": record.path,
        "status": status,
        "seconds": round(record.seconds, 4),
        "client": record.client,
        "request_id": record.request_id,
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_output_tokens,
        "error": record.error,
        "cut_off": None if record.complete else True,
    }
    _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra=with_fields(fields))


def request_id_headers(scope: Mapping[str, object]) -> dict[str, str]:
    """The header that names a request in an answer made outside of the middleware."""
    record = scope.get("loadproof.record")
    return {REQUEST_ID_HEADER: record.request_id} if isinstance(record, RequestRecord) else {}


def _record_of(scope: Scope) -> RequestRecord:
    headers = Headers(scope=scope)
    client = scope.get("client")
    record = RequestRecord(
        request_id=_request_id(headers.get(REQUEST_ID_HEADER, "")),
        method=scope["method"][:16],
        path=_shown_path(scope["path"]),
        client=f"{client[0]}:{client[1]}" if client else "unknown",
        headers=headers,
    )
    scope["loadproof.record"] = record
    return record


def _request_id(given: str) -> str:
    sane = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
    return given if sane else uuid.uuid4().hex


def _shown_path(path: str) -> str:
    """A path in the form that it has in a request, so that nothing in it looks like something else."""
    return quote(path[:_MAX_PATH], safe="/:@!$&'()*+,;=~-._", errors="replace")
