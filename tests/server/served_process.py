"""``loadproof serve`` as a process of its own, for tests of its life."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.server.running import PATIENCE, write_chat_model

ROOT = Path(__file__).parents[2]
_PROGRAM = ("-c", "from loadproof.cli import main; main()")
# Enough for a stream that ends when it is ended.
ENDLESS = {"prompt": [3, 4, 5], "max_tokens": 90000, "ignore_eos": True, "temperature": 0}


def write_long_model(directory: Path) -> Path:
    """The tiny chat model, for requests of up to 100000 tokens."""
    path = write_chat_model(directory) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 100000}))
    return directory


@dataclass
class ServerProcess:
    """A server and what it has logged, as JSON objects; lines that are no such are under ``stderr``."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    _ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where it serves; waits until it does."""
        assert self._ready.wait(PATIENCE), self.stderr
        found = [event["url"] for event in self.events if "url" in event]
        assert found, (self.events, self.stderr)
        return str(found[0])

    @property
    def log(self) -> str:
        """All that was logged."""
        return "\n".join([*self.stderr, *(json.dumps(event) for event in self.events)])

    def connect(self) -> socket.socket:
        """A plain connection."""
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port), PATIENCE)

    def client(self, **options: Any) -> httpx.Client:
        """A client to be closed by whoever takes it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait_for_log(self, text: str) -> None:
        """Wait until a message that holds ``text`` is logged."""
        end = time.monotonic() + PATIENCE
        while not any(text in event["message"] for event in self.events):
            assert time.monotonic() < end, self.log
            time.sleep(0.01)

    def wait(self) -> int:
        """Its exit code, once it has ended and its log is read to the end."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def end(self) -> None:
        """Kill it, if it is still there."""
        self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                self.stderr.append(line.rstrip("\n"))
            else:
                self.events.append(event)
                if "url" in event:
                    self._ready.set()
        self._ready.set()


@contextmanager
def served(*args: str, fault: tuple[str, int] | None = None, **env: str) -> Iterator[ServerProcess]:
    """Run ``loadproof serve`` with ``args`` on a free port, its device at fault where that is asked for."""
    program: tuple[str, ...] = _PROGRAM
    if fault is not None:
        program = ("-m", "tests.server.faulty_server", fault[0], str(fault[1]))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0", "--log-format", "json", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        # Whoever runs the tests in the background has them ignore interrupts, and children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    server = ServerProcess(process)
    try:
        yield server
    finally:
        server.end()
