"""How much memory this process may still take."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_FALLBACK = 4 << 30  # where the system tells nothing


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes free for new use: the machine's, or what a limit leaves where that is tighter.

    Limits are the control group's, and the process's own on its address space (``ulimit -v``).
    """
    machine = _meminfo(proc / "meminfo") or _physical() or _FALLBACK
    limits = (_group(cgroup), _address_space(proc / "self" / "statm"))
    return max(0, min([machine, *(left for left in limits if left is not None)]))


def _group(path: Path) -> int | None:
    limit, used = _number(path / "memory.max"), _number(path / "memory.current")
    if limit is None or used is None:
        return None
    return limit - max(0, used - _file_cache(path / "memory.stat"))


def _file_cache(path: Path) -> int:
    """Bytes of files that the group keeps in memory, and gives up for whatever needs it."""
    try:
        counts = dict(line.split() for line in path.read_text().splitlines())
        return int(counts["active_file"]) + int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _address_space(path: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return limit - int(path.read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return limit


def _meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
