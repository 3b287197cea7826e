"""Connections whose reader takes nothing: they are closed, for what waits to be sent takes memory."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST = 32 << 10  # bytes: a trickle would hold the rest for days


class ReadAnswers(H11Protocol):
    """While an answer waits for its reader, some of it must be taken every ``write_timeout`` seconds."""

    write_timeout = 60.0
    _patience: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the clock: more waits than should."""
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the clock."""
        self._stop_waiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_reader(self, size: int) -> None:
        self._patience = self.loop.call_later(self.write_timeout, self._look, size)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _look(self, before: int) -> None:
        size = self.transport.get_write_buffer_size()
        if before - size < _LEAST:
            self.transport.abort()
        else:
            self._wait_for_reader(size)
