"""loadproof's server beside llama.cpp's and vLLM's: one load generator, one machine, one run.

    python bench/serving_side_by_side.py --peers DIR [--connections 1,16,64] [--rounds 3] [--json FILE]

``bench/serving.py`` drives each over ``/v1/completions``: streamed, greedy, 128 tokens after prompts of 128
random token ids, new ones in every round and the same for all servers. All are loaded and stay loaded; a
round runs each number of connections on one server after the other, another one first in every round.
Figures are medians over rounds; ratios are formed within each round first. DIR is laid out as
``side_by_side.py`` wants it, with ``llama-server`` beside the other programs of llama.cpp; servers that are
not there are left out.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import click
from engines import OURS, EngineError, wanted
from report import summary
from rich.console import Console
from rich.table import Table
from servers import NAMES, ServerCommand, known_servers, running
from serving import Level, Load, Server, ServingError, measure_load
from side_by_side import SETTLE, rotated

Runs = dict[int, dict[str, list[Level]]]  # by connections and server, one a round
FIGURES = {  # heading: field, what to multiply by, format
    "requests/s": ("requests_per_s", 1, ".2f"),
    "ttft ms": ("ttft_median", 1000, ".0f"),
    "p99 ": ("ttft_p99", 1000, ".0f"),
    "itl ms": ("itl_median", 1000, ".1f"),
    "p99": ("itl_p99", 1000, ".1f"),
}


def compare(
    servers: Sequence[ServerCommand], connections: Sequence[int], rounds: int, console: Console
) -> tuple[Runs, dict[str, str]]:
    """Levels of all rounds, and what was said by peers that failed."""
    runs: Runs = {count: {server.name: [] for server in servers} for count in connections}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for command in servers:
            try:
                with console.status(f"starting {command.name}"):
                    urls[command.name] = stack.enter_context(running(command))
            except EngineError as error:
                if command.name == OURS:
                    raise
                failures[command.name] = str(error)
                console.print(f"going on without {command.name}: {error}", markup=False)
        for index in range(rounds):
            for count in connections:
                for name in rotated(list(urls), index):
                    time.sleep(SETTLE)
                    with console.status(f"round {index + 1}: {count} connections to {name}"):
                        server = Server(urlsplit(urls[name]), None, None)
                        level = measure_load(server, Load(connections=count, seed=index))
                    runs[count][name].append(level)
                    console.print(
                        f"round {index + 1}: {count} connections to {name}: {level.requests_per_s:.2f}/s"
                    )
    return runs, failures


def figures(levels: Sequence[Level]) -> dict[str, dict[str, float]]:
    """Median, least and largest of each figure over rounds."""
    names = ("output_tokens_per_s", *(one[0] for one in FIGURES.values()))
    return {name: summary([getattr(level, name) for level in levels]) for name in names}


def ratios(runs: Mapping[str, Sequence[Level]], peer: str) -> list[float]:
    """Requests a second over a peer's, by round."""
    return [
        ours.requests_per_s / theirs.requests_per_s
        for ours, theirs in zip(runs[OURS], runs[peer], strict=True)
    ]


def as_table(runs: Runs) -> Table:
    """Medians for people, and how many times a peer's requests a second loadproof answers."""
    table = Table(title="medians of rounds")
    for heading in ("connections", "server", *FIGURES, f"{OURS} /"):
        table.add_column(heading.strip(), justify="left" if heading == "server" else "right")
    for count, by_server in runs.items():
        for name, levels in by_server.items():
            if not levels:
                continue
            found = figures(levels)
            cells = [f"{found[key]['median'] * by:{form}}" for key, by, form in FIGURES.values()]
            both = name != OURS and by_server.get(OURS)
            ratio = f"{statistics.median(ratios(by_server, name)):.2f}x" if both else ""
            table.add_row(str(count), name, *cells, ratio)
    return table


@click.command(
    help="Compare loadproof's server with those installed under --peers; see the top of this file."
)
@click.option("--peers", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--model", default="smollm2-135m", show_default=True, help="loadproof's model.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--connections", default="1,16,64", show_default=True, help="Connections at a time.")
@click.option("--server", "names", type=click.Choice(NAMES), multiple=True, help="Some servers only.")
@click.option("--json", "path", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def main(
    peers: Path, model: str, rounds: int, connections: str, names: tuple[str, ...], path: Path | None
) -> None:
    console = Console(stderr=True)
    chosen = wanted(known_servers(model, peers.resolve()), names, console)
    try:
        counts = [int(part) for part in connections.split(",")]
    except ValueError:
        raise click.UsageError("--connections takes numbers with commas between") from None
    try:
        runs, failures = compare(chosen, counts, rounds, console)
    except (EngineError, ServingError, OSError, asyncio.IncompleteReadError) as error:
        raise click.ClickException(str(error)) from error
    Console(width=None if sys.stdout.isatty() else 120).print(as_table(runs))
    if path is not None:
        report = {
            "failures": failures,
            "rounds": {
                count: {name: [asdict(level) for level in levels] for name, levels in by_server.items()}
                for count, by_server in runs.items()
            },
            "medians": {
                count: {name: figures(levels) for name, levels in by_server.items() if levels}
                for count, by_server in runs.items()
            },
        }
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
