"""Checks, applies and reverts one fix of one file of an engine; what a fix brings is its :data:`Inspect`."""

from __future__ import annotations

import difflib
import errno
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import fixfacts
import fixstore
import fixtree
from fixsource import DriftedError, Edit, Source, decode

# Gives the edit that a file in the known faulty form needs, None for a right one; else raises DriftedError.
Inspect = Callable[[Source], Optional[Edit]]

APPLIED, NOT_NEEDED, NOT_APPLIED, REVERTED = "applied", "not needed", "not applied", "reverted"
DRIFTED, FAILED = "drifted", "failed"


class FailedError(Exception):
    """Something stood in the way; nothing was changed, and the text says what to do."""


class Report(NamedTuple):
    """How a fix stands: the answer of every command."""

    fix: str
    status: str
    reason: str
    changed: bool = False
    release: str | None = None
    file: str | None = None
    kind: str | None = None


class Change(NamedTuple):
    """An edit that was tried: the file as it would be has been read and found right."""

    edit: Edit
    before: bytes
    after: bytes


class Look(NamedTuple):
    """One look at the engine: where the file is, what it holds, and how the fix stands."""

    tree: fixtree.Tree
    path: Path
    source: Source
    change: Change | None
    status: str


@dataclass(frozen=True)
class Fix:
    """One fix: its folder's facts and its eye for the code. ``folder`` is the one that holds ``apply.py``."""

    folder: Path
    inspect: Inspect

    @property
    def facts(self) -> fixfacts.Facts:
        """The fix's data file."""
        return fixfacts.read(self.folder)

    @property
    def name(self) -> str:
        """The fix's name, which is its folder's."""
        return self.folder.name

    @property
    def mark(self) -> str:
        """How the comment over each change begins: an applied fix is told from an upstream change by it."""
        return _mark(self.name)

    def check(self, root: Path | None = None, any_release: bool = False) -> Report:
        """Say how the fix stands, and write nothing."""
        return self._report(lambda: self._found(self._look(root, any_release)), unless=DRIFTED)

    def apply(self, root: Path | None = None, any_release: bool = False) -> Report:
        """Apply the fix, unless it is applied or not needed."""
        return self._report(lambda: self._apply(root, any_release), unless=FAILED)

    def revert(self, root: Path | None = None) -> Report:
        """Undo the fix, if it is applied: the file gets the bytes back that it had."""
        return self._report(lambda: self._revert(root), unless=FAILED)

    def diff(self, root: Path | None = None, any_release: bool = False) -> bytes:
        """Give the change that applying would make, as a patch, or nothing; raises :class:`DriftedError`."""
        look = self._look(root, any_release)
        if look.change is None:
            return b""
        return _diff(self.facts.file, look.change.before, look.change.after)

    def _look(self, root: Path | None, any_release: bool) -> Look:
        tree, path = self._find(root)
        source, change = self._judge(path)
        marked = self.mark in source.text
        if change is None:
            return Look(tree, path, source, None, APPLIED if marked else NOT_NEEDED)
        if marked:
            raise DriftedError(
                f"{path} has this fix's mark, but not the whole fix: install the package again"
            )
        if not any_release:
            _check_release(self.facts, tree)
        return Look(tree, path, source, change, NOT_APPLIED)

    def _find(self, root: Path | None) -> tuple[fixtree.Tree, Path]:
        facts = self.facts
        tree = fixtree.locate(facts.package, facts.distribution, root)
        path = tree.root / facts.file
        if not path.is_file():
            release = tree.release or "of unknown release"
            raise DriftedError(f"{facts.distribution} {release} in {tree.root} has no file {facts.file}")
        return tree, path

    def _judge(self, path: Path) -> tuple[Source, Change | None]:
        try:
            data = path.read_bytes()
            source = Source(data)
            edit = self.inspect(source)
            return source, None if edit is None else Change(edit, data, self._tried(source, edit))
        except DriftedError as drift:
            raise DriftedError(f"{path}: {drift}") from drift

    def _tried(self, source: Source, edit: Edit) -> bytes:
        """Give the file as it would be, once it was found right: what check promises, apply and diff do."""
        after = source.apply(edit)
        try:
            is_right = self.inspect(Source(after)) is None
        except DriftedError:
            is_right = False
        if not is_right:
            raise DriftedError("its faulty statement is laid out in a way that the edit doesn't fit")
        return after

    def _found(self, look: Look) -> Report:
        reasons = {
            APPLIED: "the fix is in place",
            NOT_NEEDED: "the code is right already: this release has the upstream change, or one like it",
            NOT_APPLIED: "the code is in the known faulty form",
        }
        return self._stand(look, look.status, reasons[look.status])

    def _stand(self, look: Look, status: str, reason: str, changed: bool = False) -> Report:
        return Report(self.name, status, reason, changed, look.tree.release, str(look.path), look.tree.kind)

    def _report(self, act: Callable[[], Report], unless: str) -> Report:
        try:
            return act()
        except DriftedError as drift:
            return Report(self.name, DRIFTED, str(drift))
        except Exception as error:  # else the interpreter's exit code would be that of "not applied"
            return Report(self.name, unless, _explain(error))

    def _apply(self, root: Path | None, any_release: bool) -> Report:
        look = self._look(root, any_release)
        if look.status != NOT_APPLIED:
            return self._found(look)
        _check_no_link(look.tree.root, look.path)
        with fixstore.locked(look.path):
            look = self._look(root, any_release)  # another run may have been first
            if look.change is None:
                return self._found(look)
            self._change(look.path, look.change)
        return self._stand(look, APPLIED, "restart the engine to use it", changed=True)

    def _change(self, path: Path, change: Change) -> None:
        edit, before, after = change
        kept = fixstore.Kept(fixstore.digest(before), fixstore.digest(after), edit.old, edit.new, before)
        try:
            fixstore.keep(path, self.name, kept)
            fixstore.replace(path, after)
        except OSError:
            if path.read_bytes() == before:
                fixstore.forget(path, self.name)
            raise

    def _revert(self, root: Path | None) -> Report:
        tree, path = self._find(root)
        changed = False
        if self.mark.encode() in path.read_bytes() or fixstore.is_kept(path, self.name):
            _check_no_link(tree.root, path)
            with fixstore.locked(path):
                changed = self._undo(path)
        reason = "restart the engine" if changed else "there was nothing to undo"
        return Report(self.name, REVERTED, reason, changed, tree.release, str(path), tree.kind)

    def _undo(self, path: Path) -> bool:
        current = path.read_bytes()
        applied = self.mark.encode() in current
        kept = fixstore.kept_of(path, self.name)
        if applied:
            fixstore.replace(path, self._before(path, current, kept))
        elif kept is not None and _holds_fix(current, kept):
            raise FailedError(
                f"{path} has the fix's code without its mark, and was left alone: "
                f"{self._way_back(path, kept)}. If the release itself has this code by now, remove "
                f"{fixstore.backup(path, self.name)}"
            )
        with suppress(OSError):  # what stays of it does no harm, and the next run removes it
            fixstore.forget(path, self.name)
        return applied

    def _before(self, path: Path, current: bytes, kept: fixstore.Kept | None) -> bytes:
        again = self._way_back(path, kept)
        if kept is None:
            raise FailedError(f"what was kept of {path} when the fix was applied is gone: {again}")
        untouched, whole = fixstore.digest(current) == kept.after, _is_whole(kept)
        if untouched and whole:
            return kept.original
        try:
            encoding, text = decode(current)
        except DriftedError as drift:
            raise FailedError(f"{path}: {drift}: {again}") from drift
        if text.count(kept.new) != 1:
            raise FailedError(f"the fix's lines in {path} were changed by something else: {again}")
        undone = text.replace(kept.new, kept.old).encode(encoding)
        if untouched and fixstore.digest(undone) != kept.before:
            raise FailedError(f"what was kept of {path} was changed since, and isn't put back: {again}")
        if not untouched and not (whole and _is_change(kept)) and not self._is_faulty(undone):
            raise FailedError(f"{path} would not be as it was: {again}")
        return undone

    def _is_faulty(self, data: bytes) -> bool:
        try:
            return self.inspect(Source(data)) is not None
        except DriftedError:
            return False

    def _way_back(self, path: Path, kept: fixstore.Kept | None) -> str:
        again = f"to be rid of the fix, install {self.facts.distribution} again"
        if kept is None or not _is_whole(kept):
            return again
        return f"{again}, or take the file as it was before the fix: {fixstore.backup(path, self.name)}"


def _is_whole(kept: fixstore.Kept) -> bool:
    return fixstore.digest(kept.original) == kept.before


def _is_change(kept: fixstore.Kept) -> bool:
    """Whether the record's lines are the fix's: they lead from the one digest to the other."""
    try:
        encoding = decode(kept.original)[0]
        old, new = kept.old.encode(encoding), kept.new.encode(encoding)
    except (DriftedError, ValueError):
        return False
    places = [found.start() for found in re.finditer(re.escape(old), kept.original)]
    ends = ((kept.original[:place], kept.original[place + len(old) :]) for place in places)
    return any(fixstore.digest(head + new + tail) == kept.after for head, tail in ends)


def _holds_fix(current: bytes, kept: fixstore.Kept) -> bool:
    """Whether a file has the fix's lines, however they are broken and spaced, though not its mark."""
    lines = [line for line in kept.new.splitlines() if not line.lstrip().startswith("#")]
    try:
        text = decode(current)[1]
    except DriftedError:
        text = current.decode("latin-1")
    return "".join("".join(lines).split()) in "".join(text.split())


def comment(folder: Path) -> str:
    """Give the comment over each change that the fix in a folder makes."""
    facts = fixfacts.read(folder)
    return f"{_mark(facts.name)} {facts.upstream}"


def _mark(name: str) -> str:
    return f"# loadproof fix {name}:"


def _check_release(facts: fixfacts.Facts, tree: fixtree.Tree) -> None:
    known = ", ".join(facts.releases)
    if tree.release is None and tree.kind == "installed":
        raise DriftedError(
            f"the release of {facts.distribution} in {tree.root} is unknown, and the fix knows {known}: "
            "its code is in the known faulty form; --any-release takes that as enough"
        )
    if tree.release is not None and tree.release.split("+")[0] not in facts.releases:
        raise DriftedError(
            f"{facts.distribution} {tree.release} isn't a release that the fix knows ({known}), though its "
            "code is in the known faulty form; --any-release takes that as enough"
        )


def _check_no_link(root: Path, path: Path) -> None:
    for part in (path, *path.parents):
        if part == root:
            return
        if part.is_symlink():
            there, here = shlex.quote(str(part.resolve())), shlex.quote(str(part))
            own = f"cp --remove-destination {there} {here}"
            if part != path:
                own = f"rm {here} && cp -a {there} {here}"
            raise FailedError(
                f"{part} is a link to {part.resolve()}, which other environments may share: "
                f"nothing was changed. Make it one of its own first: {own}"
            )


def _explain(error: Exception) -> str:
    if isinstance(error, FailedError):
        return str(error)
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    where = error.filename if isinstance(error.filename, str) else "the tree"
    what = f"{where}: {error.strerror or error}: nothing was changed"
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return what
    return f"{what}. Run as the tree's owner, or take what --diff prints into the image"


def _diff(file: str, before: bytes, after: bytes) -> bytes:
    # Latin-1 gives each byte a character of its own, and difflib wants lines that end in a line feed only.
    old, new = (re.findall("[^\n]*\n|[^\n]+", data.decode("latin-1")) for data in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{file}", f"b/{file}")
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join(ended).encode("latin-1")
