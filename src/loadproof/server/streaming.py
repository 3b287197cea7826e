"""Answers that stop when nobody listens: event streams, and waiting for an output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from loadproof.server.errors import ApiError

_log = logging.getLogger("loadproof.server")
_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"
MOST_AT_ONCE = 1 << 18
"""Bytes of events that are joined before they are sent, not counting the last one."""


class ClientGoneError(Exception):
    """The client has closed its connection: no answer can reach it."""


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


def event_of(parts: Iterable[bytes]) -> bytes:
    """One server-sent event, whose content is JSON already."""
    return b"".join((b"data: ", *parts, b"\n\n"))


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` returns; it is cancelled, and :class:`ClientGoneError` raised, if the client goes away.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancelled(task, watch)


class EventStream(Response):
    """Sends ``events`` as they come, each some whole server-sent events; ends them if the client goes away.

    An :class:`ApiError` before the first one is answered as such; a later one is the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        watch = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _cancelled(pump, watch)
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except ApiError as error:
            refusal = JSONResponse(error.content(), error.status, {**error.headers})
            await refusal(scope, receive, send)
            return
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            _log.warning("a stream was cut off: %s", error)
            await send({"type": "http.response.body", "body": event(error.content()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end; errors of what has ended were its waiter's to see."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
