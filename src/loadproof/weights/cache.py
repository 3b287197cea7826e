"""The user's cache: its place, one process at a time in a folder, files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

_PARTIAL = ".partial-"


def default_cache_dir() -> Path:
    """``$LOADPROOF_CACHE`` where it is set, else ``loadproof`` in the user's cache directory."""
    override = os.environ.get("LOADPROOF_CACHE")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("loadproof")


@contextmanager
def locked_workspace(folder: Path) -> Iterator[Path]:
    """Hold ``folder`` against other processes and give a scratch directory inside it, removed at the end.

    Whatever a killed process left behind is removed first: the lock says that nobody is using it. The
    system drops the lock with its holder. Raises ``OSError`` where the folder can't be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder) as scratch:
            yield Path(scratch)


def publish(finished: Path, target: Path) -> None:
    """Move a finished file to ``target`` in one step, durable once this returns; both in one file system."""
    _flush(finished)
    finished.replace(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
