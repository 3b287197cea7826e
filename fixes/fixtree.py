"""Finds the engine that a fix is for, and its release, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shlex
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
    release = _release(distribution, root)
    for found in importlib.metadata.Distribution.discover(name=distribution):
        sources = _editable_sources(found)
        if sources is not None and Path(sources).resolve() in (root.resolve(), *root.resolve().parents):
            return Tree(root, release or _version(found), "editable")
    return Tree(root, release, _kind(root))


def _given(package: str, distribution: str, root: Path) -> Tree:
    if not root.is_dir():
        raise DriftedError(f"{root} isn't a folder")
    for place in (root, root / "src"):
        if (place / package).is_dir():
            return Tree(place, _release(distribution, place), _kind(place))
    for found in importlib.metadata.Distribution.discover(name=distribution, path=[str(root)]):
        sources = _editable_sources(found)
        if sources is not None:
            raise DriftedError(
                f"{distribution} is an editable install: give --root {shlex.quote(sources)}, "
                "where its sources are"
            )
    raise DriftedError(
        f"{root} holds no package {package}: --root is a site-packages folder or a source checkout"
    )


def _kind(root: Path) -> str:
    folders = [root, root.parent] if root.name == "src" else [root]
    signs = [folder / sign for folder in folders for sign in _CHECKOUT_SIGNS]
    return "checkout" if any(sign.exists() for sign in signs) else "installed"


def _release(distribution: str, root: Path) -> str | None:
    found = importlib.metadata.Distribution.discover(name=distribution, path=[str(root)])
    releases = sorted({_version(one) or "unknown" for one in found} - {"unknown"})
    if len(releases) > 1:
        raise DriftedError(
            f"{root} says that it holds several releases of {distribution}: {', '.join(releases)}"
        )
    return releases[0] if releases else None


def _editable_sources(found: importlib.metadata.Distribution) -> str | None:
    text = _text(found, "direct_url.json")
    if not text:
        return None
    try:
        origin = json.loads(text)
        editable, url = origin.get("dir_info", {}).get("editable"), urlparse(origin.get("url", ""))
        return unquote(url.path) if editable else None
    except (ValueError, AttributeError, TypeError) as error:
        raise DriftedError(
            f"{_place(found, 'direct_url.json')} isn't what installers write: {error}"
        ) from error


def _version(found: importlib.metadata.Distribution) -> str | None:
    # Not Distribution.version: what it does where there is none differs from Python to Python.
    text = _text(found, "METADATA") or _text(found, "PKG-INFO")
    line = re.search(r"^Version:[ \t]*(\S+)", text, re.MULTILINE)
    return line.group(1) if line else None


def _text(found: importlib.metadata.Distribution, name: str) -> str:
    try:
        return found.read_text(name) or ""
    except (UnicodeDecodeError, OSError) as error:
        raise DriftedError(f"{_place(found, name)} can't be read: {error}") from error


def _place(found: importlib.metadata.Distribution, name: str) -> Path:
    return Path(str(getattr(found, "_path", found.locate_file("")))) / name
