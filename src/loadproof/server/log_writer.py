"""Writing log lines from a thread of its own, so that nobody waits for whoever reads them."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

MAX_WAITING = 1 << 20  # characters of lines that wait to be written
_FLUSH_SECONDS = 1.0
_DROPPED = "log lines were dropped, for they could not be written"


class LogWriter(logging.Handler):
    """Formats records where they are made, and writes their lines to ``stream`` in a thread.

    What doesn't fit in ``limit`` characters, beside what is being written, is dropped and counted; a line
    says how many those were, made with ``dropped_fields`` of the count, once lines can be written again.
    Without a stream, as Python has none for a standard error that was closed before its start, nothing is
    written.
    """

    def __init__(
        self,
        stream: TextIO | None,
        limit: int = MAX_WAITING,
        dropped_fields: Callable[[int], Mapping[str, object]] = lambda count: {},
    ) -> None:
        super().__init__()
        self._write = _writing_to(stream)
        self._limit = limit
        self._dropped_fields = dropped_fields
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._size = 0
        self._dropped = 0
        self._writing = False
        self._closed = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; this never waits for the stream."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._size + len(line) > self._limit:
                self._dropped += 1
                return
            self._lines.append(line)
            self._size += len(line)
            self._changed.notify_all()

    def flush(self, timeout: float = _FLUSH_SECONDS) -> None:
        """Wait until all is written, or so many seconds are over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, timeout)

    def close(self) -> None:
        """Have the thread end once it has written what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while self._write_batch():
            pass

    def _write_batch(self) -> bool:
        """Write what there is, once there is something; False where no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if not self._lines:
                return False
            # What was dropped came after these, for they were too many.
            lines, dropped = self._lines, self._dropped
            self._lines, self._size, self._dropped, self._writing = [], 0, 0, True
        try:
            self._write("".join(lines + self._note(dropped)))
        except (OSError, ValueError):  # nothing can be said about it here
            with self._changed:
                self._dropped += dropped + len(lines)
        with self._changed:
            self._writing = False
            self._changed.notify_all()
        return True

    def _note(self, dropped: int) -> list[str]:
        if not dropped:
            return []
        record = logging.LogRecord("loadproof.log", logging.WARNING, __file__, 0, _DROPPED, (), None)
        record.__dict__.update(self._dropped_fields(dropped))
        return [self.format(record) + "\n"]


def _writing_to(stream: TextIO | None) -> Callable[[str], None]:
    """What writes a text there, past the stream's own buffer where there is a file below it.

    Its lock, held by a thread that waits for a reader, would end the interpreter's own end in an abort.
    """
    if stream is None:
        return lambda text: None
    try:
        number = stream.fileno()
    except (OSError, ValueError):

        def to_stream(text: str) -> None:
            stream.write(text)
            stream.flush()

        return to_stream

    def to_file(text: str) -> None:
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(number, rest) :]
            except BlockingIOError:  # another process may have made it so
                select.select([], [number], [])

    return to_file
