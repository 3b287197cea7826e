"""A progress bar for batches, on standard error and only where a person sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Where a batch reports to."""

    def advance(self, num_tokens: int) -> None:
        """One more request is done, having made ``num_tokens`` tokens."""


class _Silent:
    def advance(self, num_tokens: int) -> None:
        pass


@contextmanager
def progress_bar(total: int, *, show: bool = True) -> Iterator[Progress]:
    """A bar over ``total`` requests; silent where ``show`` is false or standard error is no terminal."""
    if not show or total == 0 or sys.stderr is None or not sys.stderr.isatty():
        yield _Silent()
        return
    from loadproof.engine.richbar import rich_bar

    with rich_bar(total) as bar:
        yield bar
