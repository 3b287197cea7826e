"""Running the application: signals, and the way down."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from loadproof.server.app import create_app
from loadproof.server.connection import connections_within
from loadproof.server.logs import configure_logging
from loadproof.server.settings import ServerConfig
from loadproof.server.sockets import bound_sockets, close_all, listen, url_of
from loadproof.server.startup import log_model, log_url
from loadproof.server.tls import tls_context

if TYPE_CHECKING:
    from fastapi import FastAPI

    from loadproof.llm import LLM

_log = logging.getLogger("loadproof.server")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WRITE_SECONDS = 5.0  # for answers that are ready, once nothing runs any more
_LAST_WORDS_SECONDS = 0.3  # for errors, where a second signal has come
INTERRUPTED = 130


def serve(llm: LLM, config: ServerConfig, sockets: Sequence[socket.socket] = ()) -> int:
    """Serve ``llm`` until a signal, and return the exit code; closes it and ``sockets``.

    These are from :func:`~loadproof.server.sockets.bound_sockets`; without any, they are made here. Raises
    :class:`OSError` where the address can't be had, and a ``ValueError`` for certificates that don't work.
    """
    listening = list(sockets)
    try:
        listening = listening or bound_sockets(config.host, config.port)
        app = create_app(llm, config)
        server = _Server(uvicorn_config(app, config), app, config)
        listen(listening, config, server.config.backlog)
    except BaseException:
        close_all(listening)
        llm.close()
        raise
    configure_logging(config)
    log_model(llm)
    uvloop.run(server.serve(listening))
    return server.exit_code


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn is set up for a server with these settings."""
    options = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=connections_within(config.read_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=config.max_header_size,
        # Clients keep idle connections for 5 seconds (httpx, and so OpenAI's) or a minute. Where the server
        # closes one first, a request that sets out just then is lost.
        timeout_keep_alive=75,
        # The last resort: connections are cut before that.
        timeout_graceful_shutdown=int(_WRITE_SECONDS) + 5,
    )
    options.load()
    options.ssl = tls_context(config)
    return options


class _Server(uvicorn.Server):
    """Lets requests finish on the first signal to end, cuts them off on a second; a third one exits."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: ServerConfig) -> None:
        super().__init__(config)
        self._engine = app.state.server.engine
        self._settings = settings
        self._received: list[signal.Signals] = []
        self._hurry = asyncio.Event()

    @property
    def exit_code(self) -> int:
        """0 after a SIGTERM, also one that cut requests off in the end; 1 where the engine has failed."""
        if self._engine.failure is not None:
            return 1
        if len(self._received) > 1:
            return 128 + self._received[-1]
        return INTERRUPTED if self._received == [signal.SIGINT] else 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals, and end normally after them.

        A third one must work where the event loop hangs, so that they are counted outside of it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def on_signal(number: int, _: FrameType | None) -> None:
            self._received.append(signal.Signals(number))
            if len(self._received) > 2:
                os._exit(128 + number)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._after_signal, len(self._received))

        # nohup has hangups ignored.
        numbers = [number for number in _SIGNALS if number != signal.SIGHUP or _is_heeded(number)]
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _after_signal(self, count: int) -> None:
        self.should_exit = True
        if count == 2:
            _log.warning("a second %s: cutting requests off", self._received[1].name)
            self._hurry.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say where."""
        await super().startup(sockets)
        first = self.servers[0].sockets[0]
        log_url(url_of(first, self._settings), first.getsockname()[1], self._settings)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine while the server still answers, then close its connections."""
        count, seconds = self._engine.num_sequences, self._settings.shutdown_timeout
        if count:
            _log.info("shutting down: %d sequences have %g seconds to finish", count, seconds)
        await self._engine.drain(seconds, self._hurry)
        cutting = asyncio.create_task(self._cut_connections())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
        _log.info("the server has ended")

    async def _cut_connections(self) -> None:
        """End those whose clients don't read what is ready for them."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), _WRITE_SECONDS)
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _is_heeded(number: signal.Signals) -> bool:
    return signal.getsignal(number) != signal.SIG_IGN
