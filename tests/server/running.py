"""A server in a thread of this process, for tests: on a free port of the loopback, over a tiny model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
import uvloop
from fastapi import FastAPI
from tests.tiny_models import write_model

from loadproof import LLM
from loadproof.server.app import create_app
from loadproof.server.serve import uvicorn_config
from loadproof.server.settings import ServerConfig

MODEL_NAME = "tiny"
PATIENCE = 60.0  # seconds until what has not come is not coming: a busy machine is no failure
# What tests of the server want of a model: short, and as few threads as the machine has for them.
ENGINE = {"served_model_name": MODEL_NAME, "max_model_len": 256, "num_threads": 1, "check_integrity": True}
CHAT_TEMPLATE = (
    "{% if thinking %}(think){% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SERVER_SETTINGS = frozenset(one.name for one in fields(ServerConfig))


def write_chat_model(directory: Path) -> Path:
    """The tiny llama with room for long texts, and a chat template that shows what it was given."""
    write_model(directory, "llama")
    changes = {
        "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE},
        "config.json": {"max_position_embeddings": 16384},  # for requests that take a while
    }
    for name, values in changes.items():
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


@dataclass
class Running:
    """A server that listens at ``url``; ``llm`` is the model that it serves, whose engine is its own."""

    url: str
    llm: LLM
    app: FastAPI
    uvicorn: uvicorn.Server
    thread: threading.Thread
    _clients: list[Callable[[], None]] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client; closed with the server."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        client = openai.OpenAI(base_url=f"{self.url}/v1", **settings)
        self._clients.append(client.close)
        return client

    def http(self, **options: Any) -> httpx.Client:
        """A plain client; closed with the server."""
        client = httpx.Client(base_url=self.url, **{"timeout": PATIENCE, **options})
        self._clients.append(client.close)
        return client

    def wait_until_idle(self) -> dict[str, int]:
        """The engine's counters once nothing runs or waits."""
        return self.wait_for(lambda stats: not stats["num_running"] and not stats["num_waiting"])

    def wait_for(self, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """The engine's counters once they are so; fails where that doesn't come about."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            stats = self.llm.stats()
            if condition(stats):
                return stats
            time.sleep(0.002)
        raise AssertionError(f"it never came about; {self.llm.stats()}")

    def check_no_leak(self) -> None:
        """Wait for the end of all requests, the server's own count of them too; then every block is free."""
        engine = self.app.state.server.engine  # which hears of an end after the engine's thread
        stats = self.wait_for(
            lambda stats: not (stats["num_running"] or stats["num_waiting"] or engine.num_sequences)
        )
        assert stats["num_free_blocks"] == stats["num_blocks"], stats

    def close(self) -> None:
        """Close all clients, and return once the server has ended: nothing listens any more."""
        for close in self._clients:
            close()
        self.uvicorn.should_exit = True
        self.thread.join()


MakeServer = Callable[..., Running]
"""The fixture ``make_server``."""


@contextmanager
def running(model: str | Path, **settings: Any) -> Iterator[Running]:
    """Serve ``model`` with these settings, the engine's or the server's, each by its name."""
    ours = {name: settings.pop(name) for name in list(settings) if name in _SERVER_SETTINGS}
    llm = LLM(str(model), **settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # who doesn't read is felt soon
        host, port = listener.getsockname()
        config = ServerConfig(host=host, port=port, **ours)
        app = create_app(llm, config)
        server = uvicorn.Server(uvicorn_config(app, config))
        thread = threading.Thread(target=lambda: uvloop.run(server.serve([listener])), name="server")
        thread.start()
        served = Running(f"http://{host}:{port}", llm, app, server, thread)
        try:
            _wait_for_start(server, thread)
            yield served
        finally:
            served.close()
            llm.close()


def _wait_for_start(server: uvicorn.Server, thread: threading.Thread) -> None:
    while not server.started:
        assert thread.is_alive(), "the server ended before it had started"
        time.sleep(0.005)
