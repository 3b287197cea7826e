"""Running the application: sockets, signals, and the way down."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from loadproof.server.app import create_app
from loadproof.server.settings import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from loadproof.llm import LLM


class _Server(uvicorn.Server):
    """On the first SIGTERM or SIGINT lets requests finish; on a second one cuts them off."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: ServerConfig) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._signals = 0
        self._hurry = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the event loop, and end normally after them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._signals += 1
        self.should_exit = True
        if self._signals > 1:
            self.force_exit = True
            self._hurry.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine while the server still answers, then close its connections."""
        drain = asyncio.ensure_future(
            self._app.state.server.engine.drain(self._settings.shutdown_timeout, self._hurry)
        )
        await drain
        await super().shutdown(sockets)


def serve(llm: LLM, config: ServerConfig) -> None:
    """Serve ``llm`` until a signal; closes it. Raises :class:`OSError` where the address can't be had."""
    app = create_app(llm, config)
    options = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        h11_max_incomplete_event_size=config.max_header_size,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        timeout_graceful_shutdown=5,
    )
    server = _Server(options, app, config)
    asyncio.run(server.serve())
