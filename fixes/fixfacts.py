"""What is known of a fix: the data file beside it, which the command line and the pages read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Facts(NamedTuple):
    """One fix's ``fix.json``. Sections are lists of paragraphs in Markdown."""

    name: str
    summary: str
    distribution: str
    package: str
    releases: list[str]
    file: str
    patches: str
    upstream: str
    upstream_url: str
    upstream_state: str
    test: str
    problem: list[str]
    symptom: list[str]
    affected: list[str]
    fix: list[str]
    verify: list[str]


def read(folder: Path) -> Facts:
    """Read the facts of the fix in a folder, whose name is the fix's."""
    found = json.loads((folder / "fix.json").read_text(encoding="utf-8"))
    return Facts(name=folder.name, **found)


def folders(root: Path) -> list[Path]:
    """Find the folders under ``root`` that hold a fix, by name."""
    return sorted(path.parent for path in root.glob("*/fix.json"))
