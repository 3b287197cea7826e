"""Checks, applies and reverts one fix of one file of an engine; what a fix brings is its :data:`Inspect`."""

from __future__ import annotations

import difflib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import fixfacts
import fixstore
import fixtree
from fixsource import DriftedError, Edit, Source

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


class Look(NamedTuple):
    """One look at the engine: where the file is, what it holds, and how the fix stands."""

    tree: fixtree.Tree
    path: Path
    source: Source
    edit: Edit | None
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
        if look.edit is None:
            return b""
        return _diff(self.facts.file, look.source.encode(look.source.text), look.source.apply(look.edit))

    def _look(self, root: Path | None, any_release: bool) -> Look:
        tree, path = self._find(root)
        source, edit = self._judge(path)
        marked = self.mark in source.text
        if edit is None:
            return Look(tree, path, source, None, APPLIED if marked else NOT_NEEDED)
        if marked:
            raise DriftedError(
                f"{path} has this fix's mark, but not the whole fix: install the package again"
            )
        if not any_release:
            _check_release(self.facts, tree)
        return Look(tree, path, source, edit, NOT_APPLIED)

    def _find(self, root: Path | None) -> tuple[fixtree.Tree, Path]:
        facts = self.facts
        tree = fixtree.locate(facts.package, facts.distribution, root)
        path = tree.root / facts.file
        if not path.is_file():
            release = tree.release or "of unknown release"
            raise DriftedError(f"{facts.distribution} {release} in {tree.root} has no file {facts.file}")
        return tree, path

    def _judge(self, path: Path) -> tuple[Source, Edit | None]:
        try:
            source = Source(path.read_bytes())
            return source, self.inspect(source)
        except DriftedError as drift:
            raise DriftedError(f"{path}: {drift}") from drift

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
        _check_no_link(look.path)
        with fixstore.locked(look.path):
            look = self._look(root, any_release)  # another run may have been first
            if look.edit is None:
                return self._found(look)
            self._change(look, look.edit)
        return self._stand(look, APPLIED, "restart the engine to use it", changed=True)

    def _change(self, look: Look, edit: Edit) -> None:
        before, after = look.source.encode(look.source.text), look.source.apply(edit)
        if self.inspect(Source(after)) is not None:
            raise DriftedError(f"{look.path} would not be right after the edit")
        kept = fixstore.Kept(fixstore.digest(before), fixstore.digest(after), edit.old, edit.new, before)
        try:
            fixstore.keep(look.path, self.name, kept)
            fixstore.replace(look.path, after)
        except OSError:
            if look.path.read_bytes() == before:
                fixstore.forget(look.path, self.name)
            raise

    def _revert(self, root: Path | None) -> Report:
        tree, path = self._find(root)
        changed = False
        if self.mark in Source(path.read_bytes()).text or fixstore.is_kept(path, self.name):
            _check_no_link(path)
            with fixstore.locked(path):
                changed = self._undo(path)
        reason = "restart the engine" if changed else "there was nothing to undo"
        return Report(self.name, REVERTED, reason, changed, tree.release, str(path), tree.kind)

    def _undo(self, path: Path) -> bool:
        current = path.read_bytes()
        applied = self.mark in Source(current).text
        kept = fixstore.kept_of(path, self.name)
        if applied:
            fixstore.replace(path, self._before(path, current, kept))
        with suppress(OSError):  # what stays of it does no harm, and the next run removes it
            fixstore.forget(path, self.name)
        return applied

    def _before(self, path: Path, current: bytes, kept: fixstore.Kept | None) -> bytes:
        again = f"to be rid of the fix, install {self.facts.distribution} again"
        if kept is None:
            raise FailedError(f"what was kept of {path} when the fix was applied is gone: {again}")
        untouched = fixstore.digest(current) == kept.after
        if untouched and fixstore.digest(kept.original) == kept.before:
            return kept.original
        source = Source(current)
        if source.text.count(kept.new) != 1:
            raise FailedError(f"the fix's lines in {path} were changed by something else: {again}")
        undone = source.encode(source.text.replace(kept.new, kept.old))
        if untouched and fixstore.digest(undone) != kept.before:
            raise FailedError(f"what was kept of {path} was changed since, and isn't put back: {again}")
        if self.inspect(Source(undone)) is None:
            raise FailedError(f"{path} would not be as it was: {again}")
        return undone


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


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise FailedError(
            f"{path} is a link to {path.resolve()}, which other environments may share: nothing was changed. "
            f"Make it a file of its own first: cp --remove-destination '{path.resolve()}' '{path}'"
        )


def _explain(error: Exception) -> str:
    if isinstance(error, FailedError):
        return str(error)
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    what = f"{error.filename or 'the tree'}: {error.strerror or error}"
    return f"{what}: nothing was changed. Run as the tree's owner, or take what --diff prints into the image"


def _diff(file: str, before: bytes, after: bytes) -> bytes:
    # Latin-1 gives each byte a character of its own, and difflib wants lines that end in a line feed only.
    old, new = (data.decode("latin-1").split("\n") for data in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{file}", f"b/{file}", lineterm="")
    return "".join(f"{line}\n" for line in lines).encode("latin-1")
