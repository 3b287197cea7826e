"""loadproof beside other engines, on one machine, in one run.

    python bench/side_by_side.py --peers DIR [--rounds 5] [--json FILE]

Every engine serves SmolLM2-135M-Instruct in bf16 with all cores, loaded once and kept loaded. A round runs
each workload on each engine in turn, so that what else the machine does falls on all of them alike; a round
that isn't counted comes first. Prompts are random token ids, new ones in every round and workload and the
same for all engines, so that no prefix cache has seen them. Decoding is greedy and never stops early. "start"
is a fresh process up to its first token, with files in the page cache.

Engines that are not installed are left out. DIR has, for each that is wanted:

    openvino/bin/python   an environment with openvino-genai
    smollm2-ov/           the model exported by optimum-cli for text-generation-with-past, weights in fp16
    llamacpp/build/bin/   llama-bench and llama-batched-bench, built for this machine
    smollm2-bf16.gguf     the model as convert_hf_to_gguf.py writes it with --outtype bf16
    vllm/bin/python       an environment with vLLM for the CPU
    smollm2/              the model in Hugging Face layout, bf16

Figures are medians over rounds; ratios are formed within each round first. Floors (``loadproof.floors``) use
this machine's own rates, the best that was measured in any round. A peer that fails is left out, with what it
said, and the others go on.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from engines import NAMES, OURS, Engine, EngineError, Worker, first_token_seconds, known_engines, wanted
from report import START, Row, as_json, as_table
from rich.console import Console

from loadproof import floors
from loadproof.bench import WORKLOADS, Workload, random_prompts
from loadproof.devices.cpu import choose_isa, default_num_threads
from loadproof.graph import Graph

SETTLE = 0.5  # seconds between engines, until the threads of the last one have gone to sleep

T = TypeVar("T")

Runs = dict[str, dict[str, list[float]]]  # seconds by workload and engine, one a round


class Comparison:
    """Loaded engines and the times they took so far."""

    def __init__(
        self, engines: Sequence[Engine], graph: Graph, console: Console, skipped: frozenset[str] = frozenset()
    ) -> None:
        self.engines = engines
        self.skipped = skipped  # "engine:workload" pairs that are not run
        self.vocab_size = graph.vocab_size
        self.cost = floors.count(graph)
        self.rates = floors.Rates(0.0, 0.0, 0.0)
        self.runs: Runs = {}
        self.versions: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self._console = console

    def run(self, workloads: Sequence[Workload], rounds: int, *, start: bool) -> None:
        """Load every engine, then ``rounds`` counted rounds after one that isn't."""
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for engine in self.engines if workloads else ():
                with self._console.status(f"loading {engine.name}"), self._peers_may_fail(engine):
                    workers[engine.name] = stack.enter_context(Worker(engine))
                    self.versions[engine.name] = workers[engine.name].version
            for index in range(rounds + 1):
                self._round(index, workloads, workers)
                if start and index:
                    self._starts(index)

    def _round(self, index: int, workloads: Sequence[Workload], workers: dict[str, Worker]) -> None:
        if index:
            self.rates = self.rates.best(floors.measure_rates(self.cost))
        for place, workload in enumerate(workloads):
            # Equal seeds would make one workload's prompts the beginnings of another's.
            prompts = random_prompts(workload, self.vocab_size, 1 + index * len(workloads) + place)
            for engine in rotated(self.running(workload.name), index):
                worker = workers[engine.name]
                self._measure(
                    index, workload.name, engine, partial(worker.seconds, prompts, workload.output_len)
                )

    def _starts(self, index: int) -> None:
        for engine in rotated(self.running(START), index):
            self._measure(index, START, engine, partial(first_token_seconds, engine))

    def _measure(self, index: int, workload: str, engine: Engine, seconds: Callable[[], float]) -> None:
        status = self._console.status(f"round {index}: {workload} on {engine.name}")
        with status, self._peers_may_fail(engine):
            time.sleep(SETTLE)
            taken = seconds()
            self._console.print(f"round {index}: {workload} on {engine.name} took {taken:.2f} s")
            if index:
                self.runs.setdefault(workload, {}).setdefault(engine.name, []).append(taken)

    @contextmanager
    def _peers_may_fail(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            if engine.name == OURS:
                raise
            self.failures[engine.name] = str(error)
            self._console.print(f"going on without {engine.name}: {error}", markup=False)

    def rows(self, workloads: Sequence[Workload]) -> list[Row]:
        """Every workload's times, engines in their own order, with its floor."""
        found = []
        for name, runs in self.runs.items():
            seconds = {engine.name: runs[engine.name] for engine in self.running(name)}
            workload = next((w for w in workloads if w.name == name), None)
            if workload is None:
                found.append(Row(None, None, None, seconds))
                continue
            hard = floors.floor(self.cost, workload, self.rates)
            soft = floors.floor(self.cost, workload, self.rates.at_product_rate)
            found.append(Row(workload, hard, soft, seconds))
        return found

    @property
    def working(self) -> list[Engine]:
        """Engines that have not failed."""
        return [engine for engine in self.engines if engine.name not in self.failures]

    def running(self, workload: str) -> list[Engine]:
        """Working engines that are to run a workload."""
        return [e for e in self.working if f"{e.name}:{workload}" not in self.skipped]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Another engine begins in every round."""
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


def load_graph(model: str) -> Graph:
    """The graph of the model, for its sizes."""
    from loadproof.models import build_graph
    from loadproof.weights.checkpoint import open_checkpoint
    from loadproof.weights.resolve import resolve_model

    return build_graph(open_checkpoint(resolve_model(model)).config)


def machine(rates: floors.Rates) -> dict[str, Any]:
    """What the figures were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "num_threads": default_num_threads(),
        "isa": choose_isa(),
        "load_average": os.getloadavg()[0],
        "read_bandwidth": rates.read_bandwidth,
        "product_rate": rates.product_rate,
        "instruction_rate": rates.instruction_rate,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@click.command(help="Compare loadproof with the engines installed under --peers; see the top of this file.")
@click.option("--peers", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--model", default="smollm2-135m", show_default=True, help="loadproof's model; a GGUF file.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--engine", "names", type=click.Choice(NAMES), multiple=True, help="Some engines only.")
@click.option(
    "--workload",
    "chosen",
    type=click.Choice([START, *(workload.name for workload in WORKLOADS)]),
    multiple=True,
    help="Some workloads only.",
)
@click.option(
    "--skip",
    "skipped",
    multiple=True,
    metavar="ENGINE:WORKLOAD",
    help="Leave a peer out of a workload that it takes long for.",
)
@click.option("--json", "path", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def main(
    peers: Path,
    model: str,
    rounds: int,
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    skipped: tuple[str, ...],
    path: Path | None,
) -> None:
    console = Console(stderr=True)
    possible = {f"{peer}:{name}" for peer in NAMES[1:] for name in (START, *(w.name for w in WORKLOADS))}
    if unknown := set(skipped) - possible:
        raise click.UsageError(f"nothing to skip is called {', '.join(sorted(unknown))}")
    engines = wanted(known_engines(model, peers.resolve()), names, console)
    workloads = [workload for workload in WORKLOADS if not chosen or workload.name in chosen]
    comparison = Comparison(engines, load_graph(model), console, frozenset(skipped))
    try:
        comparison.run(workloads, rounds, start=not chosen or START in chosen)
    except EngineError as error:
        raise click.ClickException(str(error)) from error
    found = [as_json(row) for row in comparison.rows(workloads)]
    about = machine(comparison.rates)
    out = Console(width=None if sys.stdout.isatty() else 160)
    out.print(as_table(found, [engine.name for engine in comparison.working]))
    out.print(
        f"{about['processor']}, {about['num_threads']} threads, {about['isa']}; "
        f"{about['read_bandwidth'] / 1e9:.1f} GB/s, products {about['product_rate'] / 1e9:.0f} and "
        f"instructions {about['instruction_rate'] / 1e9:.0f} GFLOP/s; {rounds} rounds"
    )
    if path is not None:
        report = {
            "machine": about,
            "rounds": rounds,
            "versions": comparison.versions,
            "failures": comparison.failures,
            "workloads": found,
        }
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
