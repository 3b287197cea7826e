"""Check, apply, again, revert: what each says, writes and leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fixes.engines import ASYNC, FAULTY, NAMES, RESUMED, RIGHT, Engine, install, load


def test_a_whole_life(engine: Engine) -> None:
    fix, root, first = engine.fix, engine.root, engine.files()

    assert fix.check(root).status == "not applied"
    assert engine.files() == first
    report = fix.apply(root)
    assert (report.status, report.changed, report.release) == ("applied", True, "0.30.0")
    applied = engine.files()
    assert fix.check(root).status == "applied"
    report = fix.apply(root)
    assert (report.status, report.changed) == ("applied", False)
    assert engine.files() == applied
    report = fix.revert(root)
    assert (report.status, report.changed) == ("reverted", True)
    assert engine.files() == first
    report = fix.revert(root)
    assert (report.status, report.changed) == ("reverted", False)
    assert engine.files() == first


def test_fix_writes_nothing_where_nothing_changes(engine: Engine) -> None:
    engine.fix.apply(engine.root)
    before = engine.file.stat()
    engine.fix.apply(engine.root)
    engine.fix.check(engine.root)
    engine.fix.diff(engine.root)

    after = engine.file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_only_the_fix_s_lines_change(engine: Engine, name: str) -> None:
    lines = engine.read().splitlines(keepends=True)
    engine.fix.apply(engine.root)
    new = engine.read().splitlines(keepends=True)

    same_above = next(n for n, (old, now) in enumerate(zip(lines, new, strict=False)) if old != now)
    same_below = next(
        n for n, (old, now) in enumerate(zip(lines[::-1], new[::-1], strict=False)) if old != now
    )
    changed = new[same_above : len(new) - same_below]
    assert changed[0].strip().decode() == f"{engine.fix.mark} {engine.fix.facts.upstream}"
    assert len(changed) == {RESUMED: 2, ASYNC: 3}[name]
    assert len(lines) - same_above - same_below == {RESUMED: 1, ASYNC: 0}[name]


def test_release_with_the_upstream_change_needs_nothing(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path, name, RIGHT[name], release="0.31.0")
    first = engine.files()

    for report in (engine.fix.check(tmp_path), engine.fix.apply(tmp_path), engine.fix.revert(tmp_path)):
        assert report.status in ("not needed", "reverted")
        assert not report.changed
    assert engine.files() == first


@pytest.mark.parametrize("release", ["0.26.0", "0.30.0", "0.30.0+gaudi"])
def test_known_releases(tmp_path: Path, name: str, release: str) -> None:
    engine = install(tmp_path, name, release=release)
    assert engine.fix.check(tmp_path).status == "not applied"


@pytest.mark.parametrize("release", ["0.25.0", "0.30.1", "0.31.0.dev3", "0.30.0rc1"])
def test_unknown_release_is_drift_unless_waved_through(tmp_path: Path, name: str, release: str) -> None:
    engine = install(tmp_path, name, release=release)
    first = engine.files()

    for report in (engine.fix.check(tmp_path), engine.fix.apply(tmp_path)):
        assert report.status == "drifted"
        assert release in report.reason
    assert engine.files() == first
    assert engine.fix.check(tmp_path, any_release=True).status == "not applied"
    assert engine.fix.apply(tmp_path, any_release=True).status == "applied"
    assert engine.fix.check(tmp_path).status == "applied"
    engine.fix.revert(tmp_path)
    assert engine.files() == first


def test_diff_is_the_change_as_a_patch(engine: Engine) -> None:
    patch = engine.fix.diff(engine.root)
    first = engine.files()
    assert engine.files() == first
    engine.fix.apply(engine.root)

    added = [line[1:] for line in patch.split(b"\n") if line.startswith(b"+") and not line.startswith(b"+++")]
    removed = [
        line[1:] for line in patch.split(b"\n") if line.startswith(b"-") and not line.startswith(b"---")
    ]
    assert added
    assert all(line in engine.read().split(b"\n") for line in added)
    assert all(line in FAULTY[engine.fix.name].encode().split(b"\n") for line in removed)
    assert patch.startswith(f"--- a/{engine.fix.facts.file}\n".encode())
    assert engine.fix.diff(engine.root) == b""


def test_record_tells_both_digests(engine: Engine) -> None:
    first = engine.read()
    engine.fix.apply(engine.root)
    kept = engine.file.parent / ".loadproof-fixes"
    import hashlib

    found = json.loads((kept / f"{engine.fix.name}.json").read_text())
    assert found["before"] == hashlib.sha256(first).hexdigest()
    assert found["after"] == hashlib.sha256(engine.read()).hexdigest()
    assert (kept / f"{engine.fix.name}.orig").read_bytes() == first


def test_upgrade_over_an_applied_fix(engine: Engine) -> None:
    """A new version of the file makes what is kept of the old one worthless."""
    engine.fix.apply(engine.root)
    newer = FAULTY[engine.fix.name].replace("caf\u00e9", "tea").encode()
    engine.file.write_bytes(newer)

    assert engine.fix.check(engine.root).status == "not applied"
    assert not engine.fix.revert(engine.root).changed
    assert engine.read() == newer
    assert engine.fix.apply(engine.root).changed
    assert engine.fix.revert(engine.root).changed
    assert engine.read() == newer


def test_change_elsewhere_outlives_the_revert(engine: Engine) -> None:
    engine.fix.apply(engine.root)
    engine.file.write_bytes(engine.read() + b"\nOPERATOR = 1\n")

    assert engine.fix.check(engine.root).status == "applied"
    assert engine.fix.revert(engine.root).changed
    assert engine.read() == FAULTY[engine.fix.name].encode() + b"\nOPERATOR = 1\n"


def damage_backup(kept: Path, name: str) -> None:
    (kept / f"{name}.orig").write_bytes(b"import os\n")


def remove_backup(kept: Path, name: str) -> None:
    (kept / f"{name}.orig").unlink()


def empty_record(kept: Path, name: str) -> None:
    (kept / f"{name}.json").write_text("")


def forge_lines(kept: Path, name: str) -> None:
    damage_backup(kept, name)
    found = json.loads((kept / f"{name}.json").read_text())
    (kept / f"{name}.json").write_text(json.dumps({**found, "old": found["old"] + "import os\n"}))


def forge_digest(kept: Path, name: str) -> None:
    damage_backup(kept, name)
    found = json.loads((kept / f"{name}.json").read_text())
    (kept / f"{name}.json").write_text(json.dumps({**found, "before": "0" * 64}))


def wrong_types(kept: Path, name: str) -> None:
    (kept / f"{name}.json").write_text("[1, 2]")


@pytest.mark.parametrize("damage", [damage_backup, remove_backup])
def test_backup_that_changed_isnt_put_back(engine: Engine, damage: object) -> None:
    """The record's lines give the file back, and its digest proves it."""
    first = engine.read()
    engine.fix.apply(engine.root)
    assert callable(damage)
    damage(engine.file.parent / ".loadproof-fixes", engine.fix.name)

    assert engine.fix.revert(engine.root).changed
    assert engine.read() == first


@pytest.mark.parametrize("damage", [empty_record, forge_lines, forge_digest, wrong_types])
def test_record_that_changed_is_refused(engine: Engine, damage: object) -> None:
    engine.fix.apply(engine.root)
    applied = engine.read()
    assert callable(damage)
    damage(engine.file.parent / ".loadproof-fixes", engine.fix.name)

    report = engine.fix.revert(engine.root)
    assert report.status == "failed"
    assert "install vllm-gaudi again" in report.reason
    assert engine.read() == applied
    assert engine.fix.check(engine.root).status == "applied"


def test_partly_applied_fix_is_drift(tmp_path: Path) -> None:
    for name, line in (
        (RESUMED, "        # {mark}\n        if request.num_computed_tokens == 0:\n            self.num_p"),
        (ASYNC, "            # {mark}\n            self._prepare_input_ids(scheduler_output)\n"),
        (
            ASYNC,
            "            host_input_ids = self.input_ids_cpu[:total_num_scheduled_tokens].clone()\n"
            "            self._prepare_input_ids(scheduler_output)\n",
        ),
    ):
        mark = load(name).mark.removeprefix("# ")
        plain = "\n".join(text for text in line.split("\n") if "mark" not in text and "host" not in text)
        assert plain in FAULTY[name]
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        engine = install(root, name, FAULTY[name].replace(plain, line.format(mark=mark)))
        assert engine.fix.check(root).status == "drifted"
        first = engine.files()
        assert engine.fix.apply(root).status == "drifted"
        assert engine.files() == first


def test_fixes_are_all_covered() -> None:
    folders = {path.parent.name for path in Path(__file__).parents[2].glob("fixes/*/apply.py")}
    assert folders == set(NAMES)
