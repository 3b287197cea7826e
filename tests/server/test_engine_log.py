"""The log's lines about what the engine does."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest
from tests.server.running import MakeServer

from loadproof.server import engine_log
from loadproof.server.async_engine import AsyncEngine
from loadproof.server.engine_log import activity, log_engine
from loadproof.server.errors import engine_failed

IDLE = {
    "prompt_tokens": 100,
    "generation_tokens": 1000,
    "prefix_cache_queries": 100,
    "prefix_cache_hits": 50,
    "num_preemptions": 3,
    "num_running": 0,
    "num_waiting": 0,
    "num_blocks": 8,
    "num_free_blocks": 8,
}


def test_no_work_no_line() -> None:
    assert activity(IDLE, IDLE, 10.0) == {}


def test_what_was_done_since() -> None:
    after = IDLE | {
        "prompt_tokens": 150,
        "generation_tokens": 1085,
        "prefix_cache_queries": 140,
        "prefix_cache_hits": 60,
        "num_running": 2,
        "num_waiting": 1,
        "num_free_blocks": 2,
        "num_preemptions": 4,
    }
    assert activity(IDLE, after, 10.0) == {
        "prompt_tokens_per_second": 5.0,
        "generation_tokens_per_second": 8.5,
        "running": 2,
        "waiting": 1,
        "kv_cache_usage": 0.75,
        "prefix_cache_hit_rate": 0.25,
        "preemptions": 1,
    }


@pytest.mark.parametrize("busy", ["num_running", "num_waiting"])
def test_work_without_progress_has_a_line(busy: str) -> None:
    fields = activity(IDLE, IDLE | {busy: 1}, 10.0)
    assert fields["generation_tokens_per_second"] == 0.0
    assert fields["prefix_cache_hit_rate"] is None


class ScriptedEngine:
    """Answers each look with the next of these, or raises it; then it has died."""

    def __init__(self, *answers: dict[str, int] | Exception) -> None:
        self.answers = list(answers)

    async def call(self, *_: object) -> dict[str, int]:
        answer = self.answers.pop(0) if self.answers else engine_failed()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_lines_while_there_is_work(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(engine_log, "INTERVAL", 0.001)
    caplog.set_level(logging.INFO, "loadproof.engine")
    busy = IDLE | {"num_running": 1}
    engine = ScriptedEngine(IDLE, busy, TimeoutError(), busy, IDLE, IDLE)
    asyncio.run(log_engine(cast(AsyncEngine, engine)))
    lines = [record.getMessage() for record in caplog.records if record.name == "loadproof.engine"]
    assert lines == ["engine", "the engine does not answer", "engine"]


def test_a_server_logs_what_its_engine_does(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_log, "INTERVAL", 0.01)
    caplog.set_level(logging.INFO, "loadproof.engine")
    served = make_server()

    def seen() -> bool:
        return any(record.getMessage() == "engine" for record in caplog.records)

    body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}
    http = served.http()
    assert http.post("/v1/completions", json=body).is_success
    served.wait_for(lambda _: seen())
