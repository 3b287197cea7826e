"""Files that commands read."""

from __future__ import annotations

import sys
from typing import Any

import click


class InputFile(click.File):
    """A file to read as bytes, so that line ends stay as they are; - is standard input."""

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The open file; a usage error where it can't be opened, a closed standard input included."""
        if value == "-" and sys.stdin is None:
            self.fail("standard input is closed", param, ctx)
        return super().convert(value, param, ctx)
