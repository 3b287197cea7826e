"""Files that commands read."""

from __future__ import annotations

import sys
from typing import Any

import click


class InputFile(click.File):
    """A file to read, as bytes where nothing else is said, so that line ends stay as they are; - is stdin."""

    def __init__(self, mode: str = "rb", encoding: str | None = None) -> None:
        super().__init__(mode, encoding)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The open file; a usage error where it can't be opened, a closed standard input included."""
        if value == "-" and sys.stdin is None:
            self.fail("standard input is closed", param, ctx)
        return super().convert(value, param, ctx)
