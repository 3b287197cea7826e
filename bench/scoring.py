"""Log-probabilities of prompts with a shared beginning, beside vLLM, in one run.

    python bench/scoring.py [--peers DIR] [--rounds 3] [--model NAME] [--json FILE]

64 prompts of 1024 shared and 32 own tokens, all at once, with one best token's log-probability a position. A
round draws new prompts and runs, on each engine in turn: *cold*, never seen; *warm*, the same again; and
*plain*, the same without log-probabilities, also warm. DIR is laid out as for ``side_by_side.py``; without
it, or without vLLM in it, loadproof runs alone. vLLM computes the whole prompts each time, which takes it a
minute or so; and as long to start.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import click
from engines import OURS, Worker, known_engines
from rich.console import Console
from rich.table import Table

NUM_PROMPTS, SHARED, OWN = 64, 1024, 32
PASSES = ("cold", "warm", "plain")
SETTLE = 0.5  # seconds between engines, until the threads of the last one have gone to sleep

Seconds = dict[str, dict[str, list[float]]]  # by engine and pass, one a round


def draw_prompts(seed: int) -> list[list[int]]:
    """Token ids that any common vocabulary has."""
    draw = random.Random(seed)
    shared = [draw.randrange(100, 40000) for _ in range(SHARED)]
    return [shared + [draw.randrange(100, 40000) for _ in range(OWN)] for _ in range(NUM_PROMPTS)]


def run_pass(worker: Worker, name: str, prompts: list[list[int]]) -> float:
    time.sleep(SETTLE)
    if name == "plain":
        return worker.seconds(prompts, 1)
    return float(worker.ask(prompts=prompts, output_len=1, prompt_logprobs=1)["seconds"])


def measure(workers: dict[str, Worker], rounds: int, console: Console) -> Seconds:
    """After a round that isn't counted on loadproof alone: its first one touches memory."""
    run_pass(workers[OURS], "cold", draw_prompts(0))
    found: Seconds = {name: {each: [] for each in PASSES} for name in workers}
    for index in range(1, rounds + 1):
        prompts = draw_prompts(index)
        for name, worker in workers.items():
            for each in PASSES:
                taken = run_pass(worker, each, prompts)
                found[name][each].append(taken)
                console.print(f"round {index}: {name} {each} took {taken:.2f} s")
    return found


def ratios(found: Seconds) -> dict[str, float]:
    """Medians of the rounds' ratios."""
    ours = found[OURS]
    result = {"warm / plain": _ratio(ours["warm"], ours["plain"])}
    for name in found.keys() - {OURS}:
        for each in PASSES:
            result[f"{name} / {OURS}, {each}"] = _ratio(found[name][each], ours[each])
    return result


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


@click.command(help="Score prompts that share a beginning; see the top of this file.")
@click.option("--peers", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", default="smollm2-135m", show_default=True, help="loadproof's model.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def main(peers: Path | None, model: str, rounds: int, path: Path | None) -> None:
    console = Console(stderr=True)
    known = known_engines(model, (peers or Path("/nonexistent")).absolute())
    with ExitStack() as stack:
        workers = {}
        for name in (OURS, "vllm"):
            if not known[name].missing:
                with console.status(f"loading {name}"):
                    workers[name] = stack.enter_context(Worker(known[name]))
        found = measure(workers, rounds, console)
    table = Table(title=f"seconds for {NUM_PROMPTS} x ({SHARED} shared + {OWN}), median of {rounds} rounds")
    table.add_column("pass")
    for name in found:
        table.add_column(name, justify="right")
    for each in PASSES:
        table.add_row(each, *(f"{statistics.median(found[name][each]):.2f}" for name in found))
    out = Console()
    out.print(table)
    for name, value in ratios(found).items():
        out.print(f"{name}: {value:.2f}")
    if path is not None:
        path.write_text(json.dumps({"seconds": found, "ratios": ratios(found)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
