"""The server's door: who may come in, and how much they may bring. Middlewares of the ASGI protocol."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loadproof.server.errors import ApiError

# A check of health must not need a secret, and says nothing else.
_OPEN_PATHS = frozenset({"/health"})
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


class ApiKeyMiddleware:
    """Lets in who has one of the keys: as ``Authorization: Bearer KEY``, or as a password (Basic).

    The latter is what browsers ask for, so that the page at ``/`` can be opened. Every key is compared in
    a time that doesn't depend on where it differs, and all of them each time.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 401."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = _given_key(Headers(scope=scope).get("authorization", ""))
            if not self._knows(given):
                await _refuse(_unauthorized(), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, given)
        return found


class BodyLimitMiddleware:
    """Refuses bodies of more than so many bytes, whether they say their length or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._limit:
            await _refuse(_too_large(self._limit), scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise _too_large(self._limit)
            return message

        await self._app(scope, counted, send)


class LocalHostMiddleware:
    """On a server for this machine alone, refuses names that aren't this machine's.

    Else a page from elsewhere could have its own name point here, and read what the server answers.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = _LOOPBACK | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 403."""
        if scope["type"] == "http":
            name = Headers(scope=scope).get("host", "localhost")
            bare = name if name.endswith("]") else name.rpartition(":")[0] or name
            if bare.lower() not in self._names:
                await _refuse(_wrong_host(), scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server there."""
    return host in _LOOPBACK or host.startswith("127.")


def _given_key(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.content(), error.status, error.headers)(scope, receive, send)


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "Give one of the server's API keys: Authorization: Bearer KEY.",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Bearer, Basic realm="loadproof"'},
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")


def _wrong_host() -> ApiError:
    return ApiError(403, "This server answers to the names of this machine only.", code="wrong_host")
