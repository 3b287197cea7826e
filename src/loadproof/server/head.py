"""HEAD wherever GET is, which some balancers probe with: its answer without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Has routes take HEAD for GET, and sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # The scope itself, for who is outside learns from it which route it was.
        scope["method"] = "GET"
        try:
            await self._app(scope, receive, sending)
        finally:
            scope["method"] = "HEAD"
