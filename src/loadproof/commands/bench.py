"""``loadproof bench``: latency and throughput of a model on this machine."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from loadproof.commands.options import GroupedCommand, engine_options, engine_settings

if TYPE_CHECKING:
    from loadproof.bench import Workload

_MAX_TOKENS = 1 << 24  # of a run: prompts are drawn beforehand, and nobody waits for more
_NAMES = ("single", "batch16", "batch64", "prefill")


@click.command("bench", cls=GroupedCommand)
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--workload", "names", type=click.Choice(_NAMES), multiple=True, help="May be repeated; all by default."
)
@click.option("--num-prompts", type=click.IntRange(1), help="Own sizes: prompts at once; default 1.")
@click.option("--input-len", type=click.IntRange(1), help="Own sizes: tokens of a prompt; default 32.")
@click.option("--output-len", type=click.IntRange(1), help="Own sizes: tokens to generate; default 128.")
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs to take medians of."
)
@engine_options
def command(
    model: str,
    as_json: bool,
    names: tuple[str, ...],
    num_prompts: int | None,
    input_len: int | None,
    output_len: int | None,
    repeat: int,
    **values: Any,
) -> None:
    """Measure MODEL on workloads of random tokens, greedy and without early stop.

    The named workloads are single (1 prompt of 32 tokens to 128 more), batch16 (16 of 128 to 128), batch64
    (64 of 256 to 128) and prefill (8 of 1024 to 1). Any of --num-prompts, --input-len and --output-len
    measures one of those sizes instead.
    """
    from loadproof.bench import measure_repeatedly
    from loadproof.llm import LLM

    workloads = _workloads(names, (num_prompts, input_len, output_len))
    start = time.perf_counter()
    with LLM(model, **engine_settings(values)) as llm:
        load_time = time.perf_counter() - start
        for workload in workloads:  # before any of them takes its time
            workload.check_fits(llm.max_model_len)
        results = []
        for workload in workloads:
            if sys.stderr is not None and sys.stderr.isatty():
                click.echo(f"measuring {workload.name} ...", err=True)
            results.append(measure_repeatedly(llm.engine, workload, repeat))
        report: dict[str, Any] = {
            "model": llm.model_name,
            "system_fingerprint": llm.system_fingerprint,
            "load_time": load_time,
            "workloads": results,
        }
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_table(report)


def _workloads(names: tuple[str, ...], sizes: tuple[int | None, int | None, int | None]) -> list[Workload]:
    from loadproof.bench import WORKLOADS, Workload

    if any(size is not None for size in sizes):
        if names:
            raise click.UsageError("--workload has sizes of its own: leave it or the sizes out")
        num_prompts, input_len, output_len = sizes
        workload = Workload("custom", num_prompts or 1, input_len or 32, output_len or 128)
        tokens = workload.num_prompts * (workload.input_len + workload.output_len)
        if tokens > _MAX_TOKENS:
            raise click.UsageError(f"these sizes make {tokens} tokens; at most {_MAX_TOKENS} are measured")
        return [workload]
    return [workload for workload in WORKLOADS if not names or workload.name in names]


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['model']}  ({report['system_fingerprint']})")
    for heading in (
        "workload",
        "sizes",
        "first token",
        "between tokens",
        "prompt tokens/s",
        "output tokens/s",
    ):
        table.add_column(
            heading, justify="left" if heading == "workload" else "right", no_wrap=heading == "sizes"
        )
    for row in report["workloads"]:
        table.add_row(
            row["name"],
            f"{row['num_prompts']} x {row['input_len']} -> {row['output_len']}",
            f"{1000 * row['ttft']:.1f} ms",
            "" if row["itl"] is None else f"{1000 * row['itl']:.2f} ms",
            f"{row['prompt_tokens_per_s']:.1f}",
            f"{row['output_tokens_per_s']:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"loaded in {report['load_time']:.2f} s; medians of {report['workloads'][0]['repeat']} runs"
    )
