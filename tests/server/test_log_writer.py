"""A log that nobody reads: the server goes on, ends when told to, and says what was lost."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import httpx
import pytest
from tests.server.running import PATIENCE
from tests.server.served_process import ROOT, write_long_model

from loadproof.server.log_writer import LogWriter
from loadproof.server.logs import configure_logging, flush_logs
from loadproof.server.settings import ServerConfig

PROGRAM = "from loadproof.cli import main; main()"


@contextmanager
def small_pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """A pipe's two ends, the one that is read first; a page fills it."""
    number, other = os.pipe()
    with os.fdopen(number) as reader, os.fdopen(other, "w") as writer:
        fcntl.fcntl(other, fcntl.F_SETPIPE_SZ, 4096)
        yield reader, writer


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "here", 1, message, (), None)


def test_what_nobody_reads_is_dropped_and_counted() -> None:
    with small_pipe() as (reader, writer):
        log = LogWriter(writer, limit=5000, dropped_fields=lambda count: {"lost": count})
        log.setFormatter(logging.Formatter("%(message)s %(lost)s", defaults={"lost": ""}))
        for place in range(1000):
            log.emit(record(f"{place:099d}"))
        log.close()
        kept: list[int] = []
        lost = 0
        for line in reader:
            *words, number = line.split()
            if words:
                assert " ".join(words) == "log lines were dropped, for they could not be written"
                lost += int(number)
            else:
                kept.append(int(number))
            if len(kept) + lost == 1000:
                break
    assert lost > 500
    assert kept == sorted(kept)
    assert kept[0] == 0


def test_what_is_read_is_all_there_in_order() -> None:
    with small_pipe() as (reader, writer):
        log = LogWriter(writer)
        for number in range(1000):
            log.emit(record(f"{number}\ud800"))
        log.close()
        assert [reader.readline() for _ in range(1000)] == [f"{number}\\ud800\n" for number in range(1000)]


def test_a_flush_waits_for_a_while_only() -> None:
    with small_pipe() as (reader, writer):
        log = LogWriter(writer)
        log.emit(record("x" * 9999))
        log.flush(0.01)  # comes back, though half is not written
        assert reader.readline() == "x" * 9999 + "\n"
        log.flush()
        log.close()


def test_a_log_that_cannot_be_written_harms_nobody() -> None:
    with small_pipe() as (reader, writer):
        reader.close()
        log = LogWriter(writer)
        for _ in range(3):
            log.emit(record("lost"))
            log.flush()
        log.close()


def test_a_log_without_a_stream_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogWriter(None)
    log.emit(record("lost"))
    log.flush()
    log.close()
    monkeypatch.setattr(sys, "stderr", None)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        configure_logging(ServerConfig())
        logging.getLogger("loadproof").warning("lost")
        flush_logs()
        (handler,) = root.handlers
        handler.close()
    finally:
        root.setLevel(level)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_long_model(tmp_path_factory.mktemp("log") / "tiny"))


def test_a_server_whose_log_nobody_reads_goes_on_and_ends(model: str) -> None:
    command = [sys.executable, "-c", PROGRAM, "serve", model, "--port", "0", "--log-format", "json"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with small_pipe() as (reader, writer):
        process = subprocess.Popen(
            [*command, "--num-threads", "1", "--kv-cache-memory", "64MiB"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writer,
            env={**os.environ, "PYTHONPATH": path},
        )
        writer.close()  # the end of the process is that of its log
        try:
            url = next(event["url"] for event in map(json.loads, reader) if "url" in event)
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                for _ in range(100):  # two hundred bytes of log each
                    assert client.get("/v1/models").status_code == 200
                assert client.get("/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
