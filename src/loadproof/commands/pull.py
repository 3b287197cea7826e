"""``loadproof pull``: have a model on this machine."""

from __future__ import annotations

import click


@click.command("pull")
@click.argument("model")
def command(model: str) -> None:
    """Fetch MODEL unless it is here already, see that it is one, and print where it lies.

    MODEL is a directory, a .gguf file, a hub id or an alias.
    """
    from loadproof.weights.checkpoint import open_checkpoint
    from loadproof.weights.resolve import resolve_model

    path = resolve_model(model)
    open_checkpoint(path)
    click.echo(path)
