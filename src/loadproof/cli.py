"""The command line: finds the command, and turns what went wrong into a line and an exit code.

0: done. 1: it failed, with one line that says why. 2: called wrongly. 130: interrupted.
``LOADPROOF_DEBUG=1`` shows the traceback too.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from loadproof import __version__

_COMMANDS = {
    "bench": "Measure latency and throughput.",
    "fix": "Repair deployed engines in place.",
    "generate": "Complete prompts with a model.",
    "pull": "Fetch a model and print where it lies.",
    "score": "Print how likely continuations, or whole texts, are.",
    "serve": "Serve a model to OpenAI's clients.",
}
_SILENT = ("serve",)  # what it has to say goes elsewhere


class _LazyGroup(click.Group):
    """Knows every command's name and summary, and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"loadproof.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="loadproof")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """LLM serving whose answer never depends on the load."""
    # Python has no stream for one that is closed, and writing to none loses the answer without a word.
    if sys.stdout is None and ctx.invoked_subcommand not in _SILENT:
        raise click.ClickException("standard output is closed: the answer would be lost")


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own where None) and return its exit code."""
    try:
        code = cli.main(args, prog_name="loadproof", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except Exception as error:
        if os.environ.get("LOADPROOF_DEBUG"):
            traceback.print_exc()
        click.echo(f"loadproof: {_one_line(error)}", err=True)
        return 1


def main() -> None:
    """Entry point of the ``loadproof`` script."""
    sys.exit(run())


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "failed"
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
