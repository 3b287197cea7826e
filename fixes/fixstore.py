"""Replaces one file so that a crash at any moment leaves the old one or the new one; keeps the way back.

Beside the file lies a folder ``.loadproof-fixes`` with, for each applied fix, the file as it was and a
record: its digest before and after, and the lines that changed. Both are on the disk before the file changes.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

_FOLDER = ".loadproof-fixes"


class Kept(NamedTuple):
    """What is kept of one applied fix: digests of the whole file, the lines' text, and the file as it was."""

    before: str
    after: str
    old: str
    new: str
    original: bytes


def digest(data: bytes) -> str:
    """Give the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file against other runs. The lock is on the file itself, which a run may replace: look again."""
    while True:
        descriptor = _locked(path)
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                yield
                return
        finally:
            os.close(descriptor)


def _locked(path: Path) -> int:
    # To read is enough but on network file systems, and the owner of a file may have no right to write it.
    for access in (os.O_RDONLY, os.O_RDWR):
        descriptor = os.open(path, access | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno != errno.EBADF or access == os.O_RDWR:
                raise
        except BaseException:
            os.close(descriptor)
            raise
    raise AssertionError


def replace(path: Path, data: bytes) -> None:
    """Give a file new contents in one step; mode, owner and extended attributes stay."""
    _remove_caches(path)
    new = _folder(path) / f"{path.name}.new"
    _write(new, data, path)
    os.replace(new, path)
    with suppress(OSError):  # the file has changed by now, whatever comes
        _sync(path.parent)


def keep(path: Path, name: str, kept: Kept) -> None:
    """Put what is kept of a fix on the disk."""
    folder = _folder(path)
    record: dict[str, Any] = {"file": path.name, **kept._asdict()}
    del record["original"]
    for tries_left in range(99, -1, -1):
        try:
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                _own(str(folder), path.parent.stat())
            _write(folder / f"{name}.orig", kept.original, path)
            break
        except FileNotFoundError:  # a run of another fix, which has a file of its own to lock, removed it
            if not tries_left:
                raise
    _write(folder / f"{name}.json", json.dumps(record, indent=1).encode(), path)
    _sync(folder)
    _sync(path.parent)


def kept_of(path: Path, name: str) -> Kept | None:
    """Read what is kept of a fix; None where there is nothing, or nothing that can be read."""
    folder = _folder(path)
    try:
        record = json.loads((folder / f"{name}.json").read_bytes())
        del record["file"]
        return Kept(**record, original=_read_or_nothing(folder / f"{name}.orig"))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def forget(path: Path, name: str) -> None:
    """Remove what is kept of a fix, what an interrupted run left, and the folder once it is empty."""
    for kept in _files(path, name):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(kept)
    with suppress(OSError):
        os.rmdir(_folder(path))


def is_kept(path: Path, name: str) -> bool:
    """Whether anything is kept of a fix, be it what an interrupted run left."""
    return any(kept.exists() for kept in _files(path, name))


def backup(path: Path, name: str) -> Path:
    """Say where a fix keeps the file as it was."""
    return _folder(path) / f"{name}.orig"


def _files(path: Path, name: str) -> list[Path]:
    return [_folder(path) / kept for kept in (f"{path.name}.new", f"{name}.orig", f"{name}.json")]


def _folder(path: Path) -> Path:
    return path.parent / _FOLDER


def _read_or_nothing(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _write(path: Path, data: bytes, like: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        wanted = like.stat()
        _own(descriptor, wanted)
        os.fchmod(descriptor, stat.S_IMODE(wanted.st_mode))
        _copy_attributes(like, descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own(target: Any, wanted: os.stat_result) -> None:
    found = os.stat(target)
    if (found.st_uid, found.st_gid) != (wanted.st_uid, wanted.st_gid):
        os.chown(target, wanted.st_uid, wanted.st_gid)


def _copy_attributes(source: Path, descriptor: int) -> None:
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # a file system or a right that lacks them loses nothing that code needs
            for name in os.listxattr(source):
                os.setxattr(descriptor, name, os.getxattr(source, name))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_caches(path: Path) -> None:
    """Remove the file's compiled forms: Python doesn't check those of some images against their source.

    This comes before the change, so that a crash between the two leaves nothing stale.
    """
    cached = Path(importlib.util.cache_from_source(str(path)))
    for folder in {cached.parent, path.parent / "__pycache__"}:
        for compiled in glob.glob(f"{glob.escape(str(folder / path.stem))}.*.pyc"):
            os.unlink(compiled)
    with suppress(FileNotFoundError):
        os.unlink(path.with_suffix(".pyc"))
