"""Servers over a tiny model: one for all tests, and others to order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.server.running import ENGINE, MakeServer, Running, running, write_chat_model

from loadproof import LLM


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model that has a chat template."""
    return write_chat_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_chat_model: Path) -> Iterator[Running]:
    """The server with its default settings; tests leave nothing behind in it."""
    with running(tiny_chat_model, **ENGINE) as served:
        yield served


@pytest.fixture(scope="module")
def make_server(tiny_chat_model: Path) -> Iterator[MakeServer]:
    """Start a server with other settings of the engine's or its own; it ends with the module's tests."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Running:
            return stack.enter_context(running(tiny_chat_model, **{**ENGINE, **settings}))

        yield make


@pytest.fixture(scope="module")
def strict(make_server: MakeServer) -> httpx.Client:
    """A client of a server that refuses what it doesn't know."""
    return make_server(strict=True).http()


@pytest.fixture(scope="session")
def reference(tiny_chat_model: Path) -> Iterator[LLM]:
    """The same model in Python, with an engine of its own: what the server must answer."""
    with LLM(str(tiny_chat_model), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    """OpenAI's client of the common server."""
    return server.openai()


@pytest.fixture(scope="session")
def http(server: Running) -> httpx.Client:
    """A plain client of the common server."""
    return server.http()


@pytest.fixture
def no_leak(server: Running) -> Iterator[None]:
    """After the test nothing of it is left in the common server's engine."""
    yield
    server.check_no_leak()
