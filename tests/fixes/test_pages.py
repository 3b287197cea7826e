"""The generated pages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fixes.engines import FIXES, copy_fixes, load

SECTIONS = ["Problem", "Symptom", "Who is affected", "The fix", "Verify"]


def pages_of(folder: Path) -> Any:
    """Load what writes the pages of a folder of fixes."""
    load("async-inputs")  # and with it the shared modules
    spec = importlib.util.spec_from_file_location("fixpages", folder / "fixpages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_of_their_facts() -> None:
    for path, text in pages_of(FIXES).pages(FIXES).items():
        assert path.read_text() == text, f"run fixes/fixpages.py: {path.name} is stale"


def test_page_s_form(name: str) -> None:
    text = (FIXES / name / "README.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]

    assert rows[2:] == ["Affects", "Releases", "Patches", "Upstream", "Test"]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == SECTIONS


def test_facts_name_what_is_there(name: str) -> None:
    facts = load(name).facts
    assert (FIXES.parent / facts.test).is_file()
    assert facts.upstream.split("#")[1] == facts.upstream_url.split("/")[-1]
    assert name in (FIXES / "README.md").read_text()


@pytest.mark.parametrize("damage", ["stale", "missing"])
def test_check_finds_stale_pages(
    tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_fixes(tmp_path)
    (tmp_path / "docs").mkdir()
    main = pages_of(folder).main
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    capsys.readouterr()

    page = folder / name / "README.md"
    if damage == "missing":
        page.unlink()
    else:
        page.write_text(page.read_text() + "\n")
    assert main(["--check"]) == 1
    assert capsys.readouterr().out == f"stale: fixes/{name}/README.md\n"


def test_command_checks_the_pages() -> None:
    run = [sys.executable, str(FIXES / "fixpages.py"), "--check"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
