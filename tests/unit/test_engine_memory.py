from __future__ import annotations

import resource
from pathlib import Path

import pytest

from loadproof.engine.memory import available_memory


def _machine(
    directory: Path, available_kb: int, limit: str | None = None, used: int = 0
) -> tuple[Path, Path]:
    (directory / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:    {available_kb} kB\n")
    if limit is not None:
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
    return directory, directory


def test_the_machines_free_memory_without_a_limit(tmp_path: Path) -> None:
    assert available_memory(*_machine(tmp_path, 1000)) == 1000 * 1024
    assert available_memory(*_machine(tmp_path, 1000, "max")) == 1000 * 1024


def test_a_control_groups_limit_counts_where_it_is_tighter(tmp_path: Path) -> None:
    assert available_memory(*_machine(tmp_path, 1000, "5000", 2000)) == 3000
    assert available_memory(*_machine(tmp_path, 1, "5000", 2000)) == 1024
    assert available_memory(*_machine(tmp_path, 1000, "5000", 6000)) == 0


def test_files_that_a_control_group_caches_are_free(tmp_path: Path) -> None:
    """As after a download: the model just written fills the group's memory until somebody wants that."""
    paths = _machine(tmp_path, 1000, "50000", 49000)
    stat = tmp_path / "memory.stat"
    stat.write_text("anon 9000\nfile 40000\ninactive_file 30000\nactive_file 9000\nshmem 1000\n")
    assert available_memory(*paths) == 40000
    stat.write_text("anon 9000\n")
    assert available_memory(*paths) == 1000
    stat.write_text("nonsense\n")
    assert available_memory(*paths) == 1000


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) > 0


def test_a_limit_on_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("100 9 9 9 0 9 0\n")
    limit = 100 * resource.getpagesize() + 5000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert available_memory(*_machine(tmp_path, 1000)) == 5000
    assert available_memory(*_machine(tmp_path, 1)) == 1024
