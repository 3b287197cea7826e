"""``loadproof fix``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fixes.engines import ASYNC, FIXES, NAMES, RESUMED, Engine, copy_fixes, install

from loadproof import cli


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = cli.run(["fix", *args])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def both(root: Path) -> list[Engine]:
    return [install(root, RESUMED), install(root, ASYNC, release=None)]


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = call(capsys, "list")
    assert code == 0
    assert [line.split(":")[0] for line in text.splitlines() if not line.startswith(" ")] == sorted(NAMES)
    for name in NAMES:
        assert call(capsys, "show", name) == (0, (FIXES / name / "README.md").read_text())


def test_all_fixes_through_their_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = both(tmp_path)[0]
    first = engine.files()
    root = ("--root", str(tmp_path))

    codes = [
        call(capsys, *args, *root)[0]
        for args in (
            ("check", "--all"),
            ("apply", RESUMED),
            ("check", RESUMED),
            ("check", "--all"),
            ("apply", "--all"),
            ("check", "--all"),
            ("revert", "--all"),
            ("check", *NAMES),
        )
    ]
    assert codes == [1, 0, 0, 1, 0, 0, 0, 1]
    assert engine.files() == first


def test_worst_code_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = both(tmp_path)[0]
    engine.file.write_text("X = 1\n")
    code, text = call(capsys, "check", "--all", "--json", "--root", str(tmp_path))

    assert code == 2
    found = [json.loads(line) for line in text.splitlines()]
    assert {one["fix"]: (one["status"], one["exit_code"]) for one in found} == {
        RESUMED: ("drifted", 2),
        ASYNC: ("not applied", 1),
    }


def test_unknown_release_can_be_waved_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, RESUMED, release="7.0")
    args = (RESUMED, "--root", str(tmp_path))
    assert call(capsys, "apply", *args)[0] == 2
    assert call(capsys, "apply", *args, "--any-release")[0] == 0


@pytest.mark.parametrize(
    "args", [["check"], ["apply"], ["revert"], ["check", "nosuch"], ["check", RESUMED, "--all"]]
)
def test_wrong_calls(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    code, text = call(capsys, *args)
    assert code == 2
    assert "Error: " in text


def test_names_are_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both(tmp_path)
    _, text = call(capsys, "check", ASYNC, ASYNC, "--json", "--root", str(tmp_path))
    assert len(text.splitlines()) == 1


def test_installed_loadproof_brings_the_fixes(tmp_path: Path) -> None:
    """An install has them in the package; here the package is laid out so, and runs on its own."""
    source = FIXES.parent / "src" / "loadproof"
    package = tmp_path / "site" / "loadproof"
    package.mkdir(parents=True)
    for name in ("__init__.py", "cli.py", "commands"):
        (package / name).symlink_to(source / name)
    copy_fixes(package)
    # An editable install would be found before any path.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if f.__module__.startswith('_frozen')]; "
        "from loadproof import cli; from loadproof.commands import fix; "
        "print(fix.fixes_folder()); print(cli.run(['fix', 'list']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.stdout.startswith(f"{package / 'fixes'}\nasync-inputs")
