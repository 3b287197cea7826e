"""Full load with random cuts against a server, for as long as you like: does memory grow, are blocks lost?

    python -m tests.server.soak --minutes 30 [--aborts 10000] [--url http://127.0.0.1:8000 --pid 1234]

Without ``--url`` it serves a tiny model itself, in a process of its own. Exits with 1 where blocks stay in
use, requests stay behind, the server fails, or its memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from tests.server.running import ENGINE, PATIENCE, running, write_chat_model

_KIB_PER_MIB = 1024
_NONE_WHEN_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_ALLOWED_GROWTH = 16.0  # MiB between the first third's end and the end: allocators settle, leaks don't


@dataclass
class Report:
    """What a soak saw: ``memory`` is the server's, in MiB, by seconds since the start."""

    num_finished: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """MiB by which the last tenth's least is above the least between a third and half of the time."""
        settled = self.memory[len(self.memory) // 3 : len(self.memory) // 2 + 1]
        last = self.memory[-max(1, len(self.memory) // 10) :]
        return min(size for _, size in last) - min(size for _, size in settled)

    def lines(self) -> Iterator[str]:
        """For people."""
        step = max(1, len(self.memory) // 20)
        for seconds, size in self.memory[::step]:
            yield f"{seconds:8.0f} s {size:9.1f} MiB"
        yield f"{self.num_finished} answers read, {self.num_aborted} cut, {self.num_refused} refused"
        yield f"memory grew by {self.growth:.1f} MiB after it had settled"
        yield from (f"PROBLEM: {problem}" for problem in self.problems)


@dataclass
class Soak:
    """``num_clients`` of them, each asking one thing after the other, until the end."""

    url: str
    pid: int
    seconds: float
    num_aborts: int
    num_clients: int = 96
    seed: int = 0
    report: Report = field(default_factory=Report)

    async def run(self) -> Report:
        """Soak, then wait until the server is idle and look at what is left."""
        start = time.monotonic()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits) as client:
            watch = asyncio.ensure_future(self._watch(start))
            clients = (self._client(client, index, start) for index in range(self.num_clients))
            await asyncio.gather(*clients)
            watch.cancel()
            await self._check_idle(client)
        if self.report.growth > _ALLOWED_GROWTH:
            self.report.problems.append(f"memory grew by {self.report.growth:.1f} MiB")
        return self.report

    def _is_over(self, start: float) -> bool:
        return time.monotonic() - start >= self.seconds and self.report.num_aborted >= self.num_aborts

    async def _client(self, client: httpx.AsyncClient, index: int, start: float) -> None:
        draw = random.Random(f"{self.seed}/{index}")
        while not self._is_over(start):
            try:
                await self._ask(client, draw)
            except httpx.HTTPError as error:
                self.report.problems.append(f"{type(error).__name__}: {error or error.__cause__!r}")
                return

    async def _ask(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """One request: read to its end, or cut after some pieces, or before any."""
        body = _body(draw)
        cut_after = draw.choice((None, 0, draw.randrange(1, 30)))
        path = "/v1/completions"
        if cut_after == 0 or not body["stream"]:
            try:
                async with asyncio.timeout(None if cut_after is None else draw.random() * 0.3):
                    self._count(await client.post(path, json=body))
            except TimeoutError:
                self.report.num_aborted += 1
            return
        async with client.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                if line and cut_after is not None and not (cut_after := cut_after - 1):
                    self.report.num_aborted += 1
                    return
            self._count(answer)

    def _count(self, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            self.report.num_finished += 1
        elif answer.status_code in (408, 429):
            self.report.num_refused += 1
        else:
            self.report.problems.append(f"status {answer.status_code}")

    async def _watch(self, start: float) -> None:
        while True:
            self.report.memory.append((time.monotonic() - start, resident_mib(self.pid)))
            await asyncio.sleep(max(0.2, self.seconds / 600))

    async def _check_idle(self, client: httpx.AsyncClient) -> None:
        end = time.monotonic() + PATIENCE
        while left := leftovers((await client.get("/metrics")).text):
            if time.monotonic() > end:
                self.report.problems.append(f"left behind when idle: {left}")
                return
            await asyncio.sleep(0.1)


def _body(draw: random.Random) -> dict[str, object]:
    prompt = draw.choice(("Shared beginning. " * 4, "x", "abc " * 20)) + str(draw.randrange(50))
    body: dict[str, object] = {"prompt": prompt, "stream": draw.random() < 0.8}
    body |= {"max_tokens": draw.choice((1, 20, 120)), "n": draw.choice((1, 1, 1, 3)), "ignore_eos": True}
    if draw.random() < 0.3:
        body |= {"logprobs": draw.randrange(5), "echo": draw.random() < 0.5}
    if draw.random() < 0.1:
        body["timeout"] = 0.05
    if draw.random() < 0.1:
        body["stop"] = ["a", "e"]
    return body


def leftovers(metrics: str) -> dict[str, float]:
    """What an idle server should have none of: requests, and blocks in use."""
    found = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        kind = name.partition("{")[0].partition(":")[2]
        if kind in _NONE_WHEN_IDLE and not line.startswith("#") and float(value):
            found[kind] = float(value)
    return found


def resident_mib(pid: int) -> float:
    """Memory of a process that is its own: pages that are there and not of files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / _KIB_PER_MIB
    raise RuntimeError(f"process {pid} has ended")


def _serve(model: str, pipe: Connection) -> None:
    settings = {**ENGINE, "check_integrity": False, "max_queue": 32, "num_blocks_override": 64}
    with running(model, **settings) as server:
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def tiny_server() -> Iterator[tuple[str, int]]:
    """URL and process id of a server with a small pool and a short queue, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        model = write_chat_model(Path(directory) / "tiny")
        process = context.Process(target=_serve, args=(str(model), theirs))
        process.start()
        try:
            url = ours.recv()
            assert process.pid is not None
            yield url, process.pid
        finally:
            ours.send(None)
            process.join()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--aborts", type=int, default=0, help="go on until so many requests were cut")
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int, help="of the server at URL")
    args = parser.parse_args()
    if (args.url is None) != (args.pid is None):
        parser.error("--url and --pid belong together")

    def soak(url: str, pid: int) -> Report:
        seconds = args.minutes * 60
        return asyncio.run(Soak(url, pid, seconds, args.aborts, args.clients, args.seed).run())

    if args.url is not None:
        report = soak(args.url, args.pid)
    else:
        with tiny_server() as (url, pid):
            report = soak(url, pid)
    print(*report.lines(), sep="\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
