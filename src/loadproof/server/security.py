"""The server's door: who may come in, and how much they may bring. Middlewares of the ASGI protocol."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loadproof.server.errors import ApiError

# A check of health must not need a secret, and says nothing else.
_OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Lets in who has one of the keys: as ``Authorization: Bearer KEY``, or as a password (Basic).

    The latter is what browsers ask for, so that the page at ``/`` can be opened. Digests are compared, all
    of them each time: how long that takes depends neither on where keys differ nor on their lengths.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 401."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = _given_key(Headers(scope=scope).get("authorization", ""))
            if not self._knows(given):
                await _refuse(_unauthorized(), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        digest, found = _digest(given), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
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
        body = _CountedBody(receive, send, self._limit)
        with contextlib.suppress(_BodyTooLargeError):
            await self._app(scope, body.receive, body.send)
        if body.refused:
            await _refuse(_too_large(self._limit), scope, receive, send)


class _BodyTooLargeError(Exception):
    """Ends the reading of a body."""


class _CountedBody:
    """A request whose body may have so many bytes; what the application makes of the rest is not sent."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._left = limit
        self._answered = False

    @property
    def refused(self) -> bool:
        return self._left < 0 and not self._answered

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _BodyTooLargeError
        return message

    async def send(self, message: Message) -> None:
        if not self.refused:
            self._answered = True
            await self._send(message)


class LocalHostMiddleware:
    """On a server for this machine alone, refuses names that aren't this machine's.

    Else a page from elsewhere could have its own name point here, and read what the server answers.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {_host_name(name) for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with 403."""
        if scope["type"] == "http":
            # Every browser names the host; what speaks HTTP/1.0 without it is none.
            name = _host_name(Headers(scope=scope).get("host", "localhost"))
            if name not in self._names and not is_loopback(name):
                await _refuse(_wrong_host(), scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server there."""
    name = host.strip().lower()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _host_name(header: str) -> str:
    """The name in a ``Host`` header, which may have a port."""
    name, colon, port = header.strip().lower().rpartition(":")
    has_port = colon and (not port or port.isdecimal()) and (name.endswith("]") or ":" not in name)
    return (name if has_port else header.strip().lower()).removesuffix(".")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
        # Alone in its header: browsers ask for no password where Bearer stands beside it.
        headers={"WWW-Authenticate": 'Basic realm="loadproof"'},
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")


def _wrong_host() -> ApiError:
    return ApiError(403, "This server answers to the names of this machine only.", code="wrong_host")
