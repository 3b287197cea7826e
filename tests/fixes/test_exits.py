"""Exit codes, and what is printed where it is hard to print."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from tests.fixes.engines import (
    FAULTY,
    FIXES,
    NAMES,
    RESUMED,
    Engine,
    copy_fixes,
    install,
    pyenv_pythons,
    record,
)


def run(
    name: str,
    *options: str,
    folder: Path = FIXES,
    stdout: IO[bytes] | int = subprocess.PIPE,
    python: str = sys.executable,
    **environment: str,
) -> tuple[int, bytes, str]:
    command = [python, "-S", "-B", str(folder / name / "apply.py"), *options]
    done = subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout or b"", done.stderr.decode()


def main(engine: Engine, *options: str) -> int:
    code: int = sys.modules["fixcli"].main(engine.fix, [*options, "--root", str(engine.root)])
    return code


def test_drift_has_a_code_of_its_own(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = install(tmp_path, name, "X = 1\n")
    assert main(engine, "--check") == 2
    assert main(engine) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{name}: drifted: ")
    assert captured.err == ""
    assert main(engine, "--diff") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "drifted" in captured.err


@pytest.mark.parametrize("broken", ["origin", "metadata", "unreadable", "bug"])
def test_whatever_is_wrong_is_said(
    engine: Engine, broken: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = engine.root / "vllm_gaudi-0.30.0.dist-info"
    if broken == "origin":
        shutil.rmtree(engine.root / "vllm_gaudi")
        (info / "direct_url.json").write_text("{")
    if broken == "metadata":
        (info / "METADATA").write_bytes(b"Version: 0.30.0\nAuthor: \xe9\n")
    if broken in ("unreadable", "bug"):
        error = PermissionError(13, "Permission denied") if broken == "unreadable" else RuntimeError("a bug")

        def fails(path: Path) -> bytes:
            raise error

        monkeypatch.setattr(Path, "read_bytes", fails)
    for option in ("--check", "--diff"):
        assert main(engine, option) == 2
        captured = capsys.readouterr()
        assert "drifted" in captured.out + captured.err


def test_fix_without_its_facts(tmp_path: Path, name: str) -> None:
    folder = copy_fixes(tmp_path)
    (folder / name / "fix.json").write_text("{")
    code, _, said = run(name, "--check", folder=folder)
    assert code == 64
    assert "Traceback" not in said


def test_fix_copied_alone(tmp_path: Path, name: str) -> None:
    shutil.copytree(FIXES / name, tmp_path / name)
    code, _, said = run(name, "--check", folder=tmp_path)
    assert code == 64
    assert "copy the folder of all fixes whole" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8"])
def test_older_python(version: str) -> None:
    found = pyenv_pythons(version)
    if not found:
        pytest.skip(f"no Python {version} here; test_sources_are_of_the_oldest_python reads the syntax")
    for name in NAMES:
        code, _, said = run(name, "--check", python=found[0])
        assert code == 64
        assert f"needs Python 3.9 or later, and this is {version}" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("place", ["full", "closed pipe"])
def test_applied_fix_is_applied_whatever_can_be_printed(engine: Engine, place: str) -> None:
    first = engine.read()
    root = ("--root", str(engine.root))
    if place == "full":
        with open("/dev/full", "wb") as full:
            code, _, said = run(engine.fix.name, *root, stdout=full)
    else:
        read, write = os.pipe()
        os.close(read)
        code, _, said = run(engine.fix.name, *root, stdout=write)
        os.close(write)
    assert engine.read() != first
    assert (code, said) == (0, "")


def test_path_that_the_terminal_cant_show(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path / "caf\u00e9 \u4e2d", name)
    code, said, error = run(name, "--root", str(engine.root), PYTHONIOENCODING="ascii")
    assert (code, error) == (0, "")
    assert b"caf\\xe9" in said


class Refusing(io.TextIOWrapper):
    """A standard output that takes nothing."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Say nothing at the end."""


@pytest.mark.parametrize("stream", [None, Refusing()])
def test_codes_without_an_output(
    engine: Engine, stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a closed one, or a full disk."""
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(engine, "--check") == 1
    assert main(engine, "--diff") == 1  # it failed, and says so
    assert "couldn't be written" in capsys.readouterr().err
    assert main(engine) == 0
    assert main(engine, "--check", "--json") == 0
    assert main(engine, "--revert") == 0


END = FAULTY[RESUMED][: FAULTY[RESUMED].index("\n        if guide :=")]
FILES = {
    "usual": FAULTY[RESUMED],
    "near the end": END,
    "near the end, without a last line end": END.rstrip("\n"),
    "in the last line, without its end": END.replace("== 0:\n            self", "== 0: self").rstrip("\n"),
    "carriage returns": FAULTY[RESUMED].replace("\n", "\r\n"),
    "carriage returns near the end": END.replace("\n", "\r\n").rstrip("\r\n"),
    "byte-order mark": "\ufeff" + FAULTY[RESUMED],
}


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize("file", FILES)
def test_patch_is_taken_by_tools(tmp_path: Path, tool: str, file: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    applied = install(tmp_path / "applied", RESUMED, FILES[file])
    assert applied.fix.apply(applied.root).changed
    engine = install(tmp_path / "patched", RESUMED, FILES[file])
    patch = tmp_path / "fix.patch"
    patch.write_bytes(engine.fix.diff(engine.root))
    command = {"patch": ["patch", "-p1", "-i"], "git": ["git", "apply"]}[tool]
    subprocess.run([*command, str(patch)], cwd=engine.root, check=True, capture_output=True, timeout=60)

    assert engine.read() == applied.read()
    assert engine.fix.check(engine.root).status == "applied"


def test_diff_is_printed_as_it_is(engine: Engine, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(engine, "--diff") == 0
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (engine.fix.diff(engine.root), b"")
    engine.fix.apply(engine.root)
    assert main(engine, "--diff") == 0
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (b"", f"{engine.fix.name}: nothing to change\n".encode())


def test_installed_records_are_told_in_json(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    record(engine.root, "0.25.0")
    assert main(engine, "--check", "--json") == 2
    assert json.loads(capsys.readouterr().out)["status"] == "drifted"
