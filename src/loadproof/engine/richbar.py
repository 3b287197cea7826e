"""The progress bar itself; its own file because importing rich costs as much as the rest together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RichBar:
    """Requests done, time left and tokens a second."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._num_tokens = 0
        self._start = time.perf_counter()

    def advance(self, num_tokens: int) -> None:
        """One more request is done, having made ``num_tokens`` tokens."""
        self._num_tokens += num_tokens
        speed = self._num_tokens / max(time.perf_counter() - self._start, 1e-9)
        self._progress.update(self._task, advance=1, speed=f"{speed:.0f} tokens/s")


@contextmanager
def rich_bar(total: int) -> Iterator[RichBar]:
    """Show a bar on standard error while the block runs."""
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield RichBar(progress, progress.add_task("requests", total=total, speed=""))
