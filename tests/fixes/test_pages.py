"""The generated pages."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fixes.engines import FIXES, copy_fixes, load

SECTIONS = ["Problem", "Symptom", "Who is affected", "The fix", "Verify"]


def test_pages_are_of_their_facts() -> None:
    load("async-inputs")
    fixpages: Any = importlib.import_module("fixpages")
    for path, text in fixpages.pages(FIXES).items():
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
def test_check_finds_stale_pages(tmp_path: Path, name: str, damage: str) -> None:
    folder = copy_fixes(tmp_path)
    (tmp_path / "docs").mkdir()
    run = [sys.executable, str(folder / "fixpages.py")]
    assert subprocess.run([*run, "--check"], capture_output=True, timeout=60, check=False).returncode == 1
    subprocess.run(run, capture_output=True, timeout=60, check=True)
    assert subprocess.run([*run, "--check"], capture_output=True, timeout=60, check=False).returncode == 0

    page = folder / name / "README.md"
    if damage == "missing":
        page.unlink()
    else:
        page.write_text(page.read_text() + "\n")
    done = subprocess.run([*run, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == f"stale: fixes/{name}/README.md\n"
