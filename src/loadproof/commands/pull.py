"""``loadproof pull``: have a model on this machine."""

from __future__ import annotations

import click


@click.command("pull")
@click.argument("model")
def command(model: str) -> None:
    """Fetch MODEL unless it is here already, and print where it lies.

    MODEL is a directory, a .gguf file, a hub id or an alias.
    """
    from loadproof.weights.resolve import resolve_model

    click.echo(resolve_model(model))
