"""Simulate any number of steps, or replay one scenario: ``python -m tests.simulation.run --help``."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.simulation.campaign import campaign
from tests.simulation.simulator import SimulationError
from tests.simulation.summary import Summary


@click.command()
@click.option("--steps", default=200_000, show_default=True, type=click.IntRange(1), help="Steps to make.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="The first scenario.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1, 256), help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def main(steps: int, seed: int, jobs: int, as_json: bool) -> None:
    """Run scenarios SEED, SEED + 1, ... until they have made STEPS steps; each runs to its end.

    Exits with 1 at the first that fails, and says how to replay it.
    """
    total, start = Summary(), time.perf_counter()
    error = _run(total, steps, seed, jobs)
    seconds = time.perf_counter() - start
    replay = f"make simulate STEPS=1 SEED={error.seed}" if error else None
    if as_json:
        failure = {"error": str(error), "seed": error.seed, "replay": replay} if error else None
        click.echo(json.dumps({"ok": error is None, "seconds": seconds, **asdict(total), "failure": failure}))
    else:
        _print(total, seconds)
    if error is not None:
        traceback.print_exception(error)
        click.echo(f"\n{error}\nreplay it with: {replay}", err=True)
        sys.exit(1)


def _run(total: Summary, steps: int, seed: int, jobs: int) -> SimulationError | None:
    """Add up the scenarios in ``total``; returns what ended them early."""
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("steps", total=steps)
        try:
            for summary in campaign(steps, seed, jobs):
                total.add(summary)
                progress.update(task, completed=min(total.steps, steps))
        except SimulationError as error:
            return error
    return None


def _print(total: Summary, seconds: float) -> None:
    for name, value in asdict(total).items():
        click.echo(f"{name.replace('_', ' '):24}{value:>14,}")
    click.echo(f"{'steps a second':24}{total.steps / max(seconds, 1e-9):>14,.0f}")


if __name__ == "__main__":
    main()
