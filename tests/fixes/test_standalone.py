"""The fixes as operators run them: a copied folder, a bare Python, any working directory."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fixes.engines import FIXES, Engine, copy_fixes, pyenv_pythons

OLDEST = "3.9"


def oldest_python() -> str | None:
    """A Python 3.9, if the machine has one."""
    return next(iter(pyenv_pythons(OLDEST)), None) or shutil.which(
        f"python{OLDEST}"
    )  # a shim on the path may not run


def run(python: str, folder: Path, name: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a copied fix on a Python without site-packages, where warnings are errors."""
    command = [python, "-S", "-E", "-s", "-W", "error", str(folder / name / "apply.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.fixture(params=["this Python", "the oldest Python"])
def python(request: pytest.FixtureRequest) -> str:
    if request.param == "this Python":
        return sys.executable
    found = oldest_python()
    if found is None:
        pytest.skip(f"no Python {OLDEST} here; test_sources_are_of_the_oldest_python reads the syntax")
    return found


def test_copied_folder_on_a_bare_python(python: str, engine: Engine, name: str, tmp_path: Path) -> None:
    folder = copy_fixes(tmp_path / "mount point")
    copied = sorted(folder.rglob("*"))
    first = engine.files()
    root = ("--root", str(engine.root))

    found = [
        (run(python, folder, name, *options, *root, cwd=tmp_path).returncode, engine.files() == first)
        for options in (("--check",), (), ("--check",), ("--revert",))
    ]
    assert found == [(1, True), (0, False), (0, False), (0, True)]
    assert sorted(folder.rglob("*")) == copied, "a run must not write into the folder, which may be shared"


def test_engine_of_this_python(engine: Engine, name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FIXES / name / "apply.py"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(engine.root)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path, env=environment
    )
    report = json.loads(done.stdout)

    assert report["status"] == "applied"
    assert report["file"] == str(engine.file)
    assert report["exit_code"] == 0


def test_relative_root_and_folder(engine: Engine, name: str, tmp_path: Path) -> None:
    copy_fixes(tmp_path)
    root = str(engine.root.relative_to(tmp_path))
    done = run(sys.executable, Path("fixes"), name, "--root", root, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{name}: applied: restart the engine")


@pytest.mark.parametrize(
    "options",
    [
        ["--bogus"],
        ["--check", "--revert"],
        ["extra"],
        ["--root"],
        ["--diff", "--json"],
        ["--revert", "--any-release"],
        ["--root", ""],
        ["--root="],
    ],
)
def test_wrong_calls_write_nothing(
    engine: Engine,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = engine.files()
    monkeypatch.chdir(engine.root)
    with pytest.raises(SystemExit) as left:
        sys.modules["fixcli"].main(engine.fix, options)
    assert left.value.code == 64
    assert "usage" in capsys.readouterr().err
    assert engine.files() == first


def test_sources_are_of_the_oldest_python() -> None:
    sources = [*FIXES.glob("*.py"), *FIXES.glob("*/*.py")]
    assert sources
    for path in sources:
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        future = [
            node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        if path.name == "apply.py":  # even older ones must come to the line that says so
            ast.parse(path.read_text(), feature_version=(3, 6))
            assert not future, f"{path} has what Python 3.6 doesn't read"
        else:
            assert future, f"{path} evaluates its annotations"


def test_only_the_standard_library_is_imported() -> None:
    own = {path.stem for path in FIXES.glob("*.py")} | {"__future__"}
    for path in [*FIXES.glob("*.py"), *FIXES.glob("*/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= own | sys.stdlib_module_names
