"""The engines of the comparison: what each needs, how it is started, and a running one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import click
from rich.console import Console

DRIVERS = Path(__file__).resolve().parent / "peers"
OURS = "loadproof"
NAMES = (OURS, "openvino", "llamacpp", "vllm")
PATIENCE = 900.0  # seconds until an answer that has not come is not coming

P = TypeVar("P", bound="Program")


class EngineError(RuntimeError):
    """An engine that ended, or did not answer, with its last words."""


@dataclass(frozen=True)
class Program:
    """What is compared: ours or a peer's, and the paths that must be there for it."""

    name: str
    needs: tuple[Path, ...]

    @property
    def missing(self) -> list[Path]:
        """Paths that are needed and not there."""
        return [path for path in self.needs if not path.exists()]

    @property
    def environment(self) -> dict[str, str]:
        """A peer has its own packages, so it sees none of ours."""
        return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or self.name == OURS}


@dataclass(frozen=True)
class Engine(Program):
    """Commands that serve requests by ``peers/protocol.py`` and that print a line at the first token."""

    serve: list[str]
    first_token: list[str]


def wanted(known: Mapping[str, P], names: Sequence[str], console: Console) -> list[P]:
    """Programs by name; all that are installed where none is named. A named one must be there."""
    found = []
    for name in names or known:
        lacking = ", ".join(map(str, known[name].missing))
        if lacking and names:
            raise click.UsageError(f"{name} needs {lacking}")
        if lacking:
            console.print(f"without {name}: no {lacking}")
        else:
            found.append(known[name])
    return found


def known_engines(model: str, peers: Path) -> dict[str, Engine]:
    """Every engine by name; see ``side_by_side.py`` for the layout of ``peers``."""
    bench, gguf = peers / "llamacpp/build/bin/llama-bench", peers / "smollm2-bf16.gguf"
    threads = str(len(os.sched_getaffinity(0)))
    llamacpp = _driver("llamacpp", Path(sys.executable), str(peers))
    prompt_only = [
        "-m",
        str(gguf),
        "-t",
        threads,
        "-p",
        "8",
        "-n",
        "0",
        "-r",
        "1",
        "--no-warmup",
        "-o",
        "jsonl",
    ]
    engines = [
        _driver(OURS, Path(sys.executable), model),
        _driver("openvino", peers / "openvino/bin/python", str(peers), peers / "smollm2-ov"),
        Engine(
            "llamacpp",
            (bench, bench.with_name("llama-batched-bench"), gguf),
            llamacpp.serve,
            [str(bench), *prompt_only],
        ),
        _driver("vllm", peers / "vllm/bin/python", str(peers), peers / "smollm2"),
    ]
    return {engine.name: engine for engine in engines}


def _driver(name: str, python: Path, place: str, *needs: Path) -> Engine:
    command = [str(python), str(DRIVERS / f"{name}_driver.py"), place]
    return Engine(name, (python, *needs), command, [*command, "--first-token"])


class Process:
    """A started command whose stdout is read by line, with its stderr kept for an error's message.

    A context manager; at its end the command is told by the end of its stdin, and killed if it stays.
    """

    def __init__(self, engine: Engine, command: list[str]) -> None:
        self.name = engine.name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=engine.environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer; raises :class:`EngineError` where none comes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that is a JSON object; raises :class:`EngineError` where none comes."""
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            timer.cancel()
        raise self._failure()

    def _failure(self) -> EngineError:
        self._process.kill()
        code = self._process.wait()
        said = last_words(self._errors)
        return EngineError(f"{self.name} ended with code {code} before it answered; it last said:\n{said}")


def last_words(log: IO[bytes]) -> str:
    """The end of what a process wrote to a file."""
    log.seek(0)
    return log.read().decode(errors="replace")[-2000:].strip()


class Worker(Process):
    """An engine that stays loaded between requests."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, engine.serve)
        self.version: str = self.answer()["version"]

    def seconds(self, prompts: list[list[int]], output_len: int) -> float:
        """Time of a request; raises :class:`EngineError` if it produced another number of tokens."""
        answer = self.ask(prompts=prompts, output_len=output_len)
        expected = len(prompts) * output_len
        if answer["output_tokens"] != expected:
            raise EngineError(f"{self.name} produced {answer['output_tokens']} tokens, not {expected}")
        return float(answer["seconds"])


def first_token_seconds(engine: Engine) -> float:
    """Time from the start of a fresh process to the line that it prints at its first token."""
    start = time.perf_counter()
    with Process(engine, engine.first_token) as process:
        process.answer()
        return time.perf_counter() - start
