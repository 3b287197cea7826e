"""Reverts of files that were changed since the fix was applied."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixes.engines import ASYNC, FAULTY, RESUMED, Engine, install


def unmarked(engine: Engine) -> bytes:
    return b"".join(line for line in engine.read().splitlines(True) if b"loadproof fix" not in line)


UNMARKED: dict[str, Callable[[Engine], bytes]] = {
    "mark gone": unmarked,
    "mark in other words": lambda engine: engine.read().replace(b"loadproof fix", b"our fix"),
    "mark gone and line ends changed": lambda engine: unmarked(engine).replace(b"\n", b"\r\n"),
    "mark gone and indented otherwise": lambda engine: unmarked(engine).replace(b"    ", b"\t"),
    "no comments": lambda engine: ast.unparse(ast.parse(engine.read())).encode(),
    "mark gone and broken elsewhere": lambda engine: unmarked(engine) + b"def (:\n",
}


@pytest.mark.parametrize("change", UNMARKED)
def test_fix_without_its_mark_isnt_forgotten(engine: Engine, change: str) -> None:
    """It is still there: a revert that said so little would leave it in place for ever."""
    original = engine.read()
    engine.fix.apply(engine.root)
    engine.file.write_bytes(UNMARKED[change](engine))
    first = engine.files()

    report = engine.fix.revert(engine.root)
    assert (report.status, report.changed) == ("failed", False)
    assert str(engine.file) in report.reason
    backup = engine.file.parent / ".loadproof-fixes" / f"{engine.fix.name}.orig"
    assert str(backup) in report.reason
    assert backup.read_bytes() == original
    assert engine.files() == first


def in_the_method(name: str, code: bytes) -> bytes:
    """A change within the patched method that no fix knows."""
    old = {RESUMED: b"        if guide :=", ASYNC: b"        return token_ids_device"}[name]
    more = {RESUMED: b"self.num_prompt_tokens.sort()\n", ASYNC: b"total_num_scheduled_tokens = 0\n"}[name]
    assert code.count(old) == 1
    return code.replace(old, b"        " + more + old)


def elsewhere(name: str, code: bytes) -> bytes:
    return code + b"\ndef (:\n"


@pytest.mark.parametrize("change", [in_the_method, elsewhere])
def test_change_that_the_fix_doesnt_know_outlives_the_revert(
    engine: Engine, change: Callable[[str, bytes], bytes]
) -> None:
    first = engine.read()
    engine.fix.apply(engine.root)
    engine.file.write_bytes(change(engine.fix.name, engine.read()))
    assert engine.fix.check(engine.root).status == "drifted"

    assert engine.fix.revert(engine.root).changed
    assert engine.read() == change(engine.fix.name, first)
    assert not (engine.file.parent / ".loadproof-fixes").exists()


@pytest.mark.parametrize("change", [in_the_method, elsewhere])
@pytest.mark.parametrize("is_whole", [True, False])
def test_refused_revert_says_where_and_what_to_do(
    engine: Engine, change: Callable[[str, bytes], bytes], is_whole: bool
) -> None:
    engine.fix.apply(engine.root)
    engine.file.write_bytes(change(engine.fix.name, engine.read()).replace(b"\n", b"\r\n"))
    backup = engine.file.parent / ".loadproof-fixes" / f"{engine.fix.name}.orig"
    if not is_whole:
        backup.write_bytes(b"")
    first = engine.files()

    report = engine.fix.revert(engine.root)
    assert report.status == "failed"
    assert str(engine.file) in report.reason
    assert "install vllm-gaudi again" in report.reason
    assert (str(backup) in report.reason) == is_whole
    assert engine.files() == first


@pytest.mark.parametrize("data", [b"# coding: klingon\n", b"\xff\xfe"])
def test_file_that_cant_be_read_any_more(engine: Engine, data: bytes) -> None:
    engine.fix.apply(engine.root)
    engine.file.write_bytes(data + engine.read())

    report = engine.fix.revert(engine.root)
    assert report.status == "failed"
    assert str(engine.file) in report.reason
    assert ".orig" in report.reason


def test_two_fixes_at_once_share_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes it or removes it while the other is about to use it."""
    one, two = install(tmp_path, RESUMED), install(tmp_path, ASYNC, release=None)
    first = one.files()
    folder = one.file.parent / ".loadproof-fixes"
    real, made = Path.mkdir, 0

    def raced(path: Path, *args: object, **options: bool) -> None:
        nonlocal made
        made += 1
        if made == 1:
            real(path)  # the other is faster
        real(path, **options)
        if made == 2:
            path.rmdir()  # the other has no more use for it

    monkeypatch.setattr(Path, "mkdir", raced)
    assert one.fix.apply(tmp_path).changed
    folder.rename(tmp_path / "kept")
    made = 1
    assert two.fix.apply(tmp_path).changed
    assert made == 3
    monkeypatch.undo()
    for kept in (tmp_path / "kept").iterdir():
        kept.rename(folder / kept.name)
    (tmp_path / "kept").rmdir()
    for call in ("revert", "apply", "revert"):
        assert all(getattr(fix, call)(tmp_path).changed for fix in (one.fix, two.fix))
    assert one.files() == first


def test_upgrade_that_isnt_the_fix_is_forgotten(engine: Engine) -> None:
    engine.fix.apply(engine.root)
    engine.file.write_bytes(FAULTY[engine.fix.name].encode() + b"# newer\n")
    assert engine.fix.revert(engine.root).status == "reverted"
    assert not (engine.file.parent / ".loadproof-fixes").exists()
