"""Finds the engine that a fix is for, and its release, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from fixsource import DriftedError

_CHECKOUT_SIGNS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


class Tree(NamedTuple):
    """Where a package lies: the folder that holds it, its release if known, and what kind of place it is."""

    root: Path
    release: str | None
    kind: str  # "installed", "editable" or "checkout"


def locate(package: str, distribution: str, root: Path | None) -> Tree:
    """Find a package under ``root``, or, where that is None, where this Python would import it from."""
    return _installed(package, distribution) if root is None else _given(package, distribution, root)


def _installed(package: str, distribution: str) -> Tree:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise DriftedError(
            f"{distribution} isn't installed for {sys.executable}: "
            "run with the engine's Python, or give --root"
        )
    root = Path(places[0]).parent
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Tree(root, None, "checkout" if _is_checkout(root) else "installed")
    place = Path(str(found.locate_file(package))).resolve()
    return Tree(root, _version(found), "installed" if place == Path(places[0]).resolve() else "editable")


def _given(package: str, distribution: str, root: Path) -> Tree:
    if not root.is_dir():
        raise DriftedError(f"{root} isn't a folder")
    for place in (root, root / "src"):
        if (place / package).is_dir():
            release = _release(distribution, place)
            return Tree(place, release, "checkout" if _is_checkout(root) else "installed")
    sources = _editable_sources(distribution, root)
    if sources:
        raise DriftedError(
            f"{distribution} is an editable install: give --root {sources}, where its sources are"
        )
    raise DriftedError(
        f"{root} holds no package {package}: --root is a site-packages folder or a source checkout"
    )


def _is_checkout(root: Path) -> bool:
    return any((root / sign).exists() for sign in _CHECKOUT_SIGNS)


def _release(distribution: str, root: Path) -> str | None:
    found = importlib.metadata.Distribution.discover(name=distribution, path=[str(root)])
    releases = sorted({_version(one) or "unknown" for one in found} - {"unknown"})
    if len(releases) > 1:
        raise DriftedError(
            f"{root} says that it holds several releases of {distribution}: {', '.join(releases)}"
        )
    return releases[0] if releases else None


def _editable_sources(distribution: str, root: Path) -> str | None:
    for found in importlib.metadata.Distribution.discover(name=distribution, path=[str(root)]):
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            return unquote(urlparse(origin.get("url", "")).path)
    return None


def _version(found: importlib.metadata.Distribution) -> str | None:
    # Not Distribution.version: what it does where there is none differs from Python to Python.
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    line = re.search(r"^Version:\s*(\S+)", text, re.MULTILINE)
    return line.group(1) if line else None
