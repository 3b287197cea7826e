"""From a model's name to local files: a path, an alias or a hub id, tried in this order."""

from __future__ import annotations

from pathlib import Path

from loadproof.weights.aliases import ALIASES
from loadproof.weights.cache import default_cache_dir
from loadproof.weights.fetch import ModelNotFoundError, fetch_alias
from loadproof.weights.gguf import MAGIC
from loadproof.weights.hub import fetch_from_hub, parse_hub_id

__all__ = ["ModelNotFoundError", "resolve_model"]


def resolve_model(name: str, *, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The directory or ``.gguf`` file that ``name`` stands for, downloaded first where it has to be.

    ``name`` is an existing path; else an alias, kept in ``cache_dir`` (by default the user's cache); else a
    hub id, kept in the hub's own cache. ``progress`` shows bars where standard error is a terminal. Raises
    :class:`ModelNotFoundError` naming every place that was tried.
    """
    path = _expanded(name)
    if name and _exists(path):
        return _checked_path(path)
    if name in ALIASES:
        return fetch_alias(ALIASES[name], cache_dir or default_cache_dir(), progress=progress)
    hub_id = parse_hub_id(name)
    # A name that ends in .gguf without naming a repository's file is a path that isn't there.
    if hub_id is not None and (hub_id.file is not None or not name.endswith(".gguf")):
        return fetch_from_hub(hub_id, progress=progress)
    raise ModelNotFoundError(
        f"no model {name!r}: there is no file or directory {path.absolute()}, it is none of the aliases "
        f"({', '.join(ALIASES)}), and no hub id (org/name, org/name@revision or org/name:FILE.gguf)"
    )


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~ of a user that there isn't
        return Path(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, a NUL in it
        return False


def _checked_path(path: Path) -> Path:
    if path.is_dir():
        return path
    if not path.is_file():  # opening a FIFO would wait for somebody to write
        raise ModelNotFoundError(f"{path} is neither a directory nor a regular file")
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return path
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror or error}") from error
    raise ModelNotFoundError(f"{path} is neither a model directory nor a GGUF file")
