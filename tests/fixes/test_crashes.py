"""Runs that die at any step, that fail at any step, and that run at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.fixes.engines import ASYNC, RESUMED, Engine, ended, in_child, install, load, started

if TYPE_CHECKING:
    from fixlib import Fix

CALLS = ["open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir", "fchmod", "chown"]


def die(engine: Engine, when: str, at: int, act: Callable[[Fix, Path], object]) -> bool:
    """Run a fix in a process that dies before, amid or after its nth change; whether it came so far."""
    count = 0

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            count += 1
            if count < at:
                return real(*args, **kwargs)
            if when == "after":
                real(*args, **kwargs)
            elif when == "amid" and name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            os._exit(9)

        return changed

    def run() -> None:
        for name in CALLS:
            setattr(os, name, dying(name, getattr(os, name)))
        act(engine.fix, engine.root)

    return in_child(run)[0] == 9


def package(engine: Engine) -> dict[str, bytes]:
    """The engine's own files, without what fixes keep beside them."""
    return {path: data for path, data in engine.files().items() if ".loadproof-fixes" not in path}


@pytest.mark.parametrize("when", ["before", "amid", "after"])
def test_dead_run_leaves_the_old_file_or_the_new_one(engine: Engine, when: str) -> None:
    fix, root, first, old = engine.fix, engine.root, engine.files(), package(engine)
    fix.apply(root)
    new = package(engine)
    fix.revert(root)
    seen = set()
    call = 0
    while die(engine, when, call := call + 1, lambda fix, root: fix.apply(root)):
        found = package(engine)
        assert found in (old, new)
        seen.add(found == new)
        assert fix.check(root).status == ("applied" if found == new else "not applied")
        assert fix.apply(root).status == "applied"
        assert package(engine) == new
        assert fix.revert(root).changed
        assert engine.files() == first
    assert call > 10
    assert seen == {False, True}
    assert package(engine) == new


@pytest.mark.parametrize("when", ["before", "after"])
def test_dead_revert_leaves_the_old_file_or_the_new_one(engine: Engine, when: str) -> None:
    fix, root, first, old = engine.fix, engine.root, engine.files(), package(engine)
    fix.apply(root)
    new = package(engine)
    call = 0
    while die(engine, when, call := call + 1, lambda fix, root: fix.revert(root)):
        found = package(engine)
        assert found in (old, new)
        assert fix.check(root).status == ("applied" if found == new else "not applied")
        assert fix.revert(root).status == "reverted"
        assert engine.files() == first
        fix.apply(root)
    assert call > 5
    assert engine.files() == first


@contextmanager
def failing(call: int) -> Iterator[list[str]]:
    """Have the nth change of a tree fail as on a full disk; gives the calls so far."""
    made: list[str] = []

    def change(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                made.append(name)
                if len(made) == call:
                    raise OSError(28, "No space left on device", str(args[0]))
            return real(*args, **kwargs)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, change(name, getattr(os, name)))
        yield made


def test_failed_run_leaves_everything_as_it_was(engine: Engine) -> None:
    """Whatever fails before the file is replaced; what fails after it takes nothing back."""
    fix, root, first, old = engine.fix, engine.root, engine.files(), package(engine)
    call = 0
    statuses = []
    while True:
        with failing(call := call + 1) as made:
            report = fix.apply(root)
        statuses.append(report.status)
        if report.status == "failed":
            assert "No space left on device" in report.reason
            assert package(engine) == old
        else:
            assert package(engine) != old
        assert fix.apply(root).status == "applied"
        assert fix.revert(root).status == "reverted"
        assert engine.files() == first
        if len(made) < call:
            break
    assert statuses.count("failed") > 8
    assert statuses[-1] == "applied"


def at_once(acts: list[Callable[[], Any]]) -> list[Any]:
    """Run things in processes of their own that begin together; what they give."""
    start, go = os.pipe()

    def waiting(act: Callable[[], Any]) -> Callable[[], bytes]:
        def begin() -> bytes:
            os.close(go)
            os.read(start, 1)  # ends when this process closes the other end
            return json.dumps(act()).encode()

        return begin

    runs = [started(waiting(act)) for act in acts]
    os.close(go)
    found = [ended(run) for run in runs]
    os.close(start)
    assert [code for code, _ in found] == [0] * len(acts)
    return [json.loads(given) for _, given in found]


def test_many_runs_at_once(engine: Engine) -> None:
    """One of them applies the fix, the others find it applied; likewise for reverts."""
    first = engine.files()
    for call, status in (("apply", "applied"), ("revert", "reverted")):
        found = at_once([partial(getattr(engine.fix, call), engine.root)] * 6)
        assert [one[1] for one in found] == [status] * 6
        assert sum(one[3] for one in found) == 1
    assert engine.files() == first


def test_both_fixes_at_once_on_one_tree(tmp_path: Path) -> None:
    """Their files lie in one folder, and so does what is kept of them."""
    one, two = install(tmp_path, RESUMED), install(tmp_path, ASYNC, release=None)
    first = one.files()
    for calls in (("apply", "apply"), ("revert", "apply"), ("apply", "revert"), ("revert", "revert")) * 3:
        pairs = zip((one.fix, two.fix), calls, strict=True)
        acts: list[Callable[[], Any]] = [partial(getattr(fix, call), tmp_path) for fix, call in pairs]
        for (_, status, reason, *_), call in zip(at_once(acts), calls, strict=True):
            assert status == {"apply": "applied", "revert": "reverted"}[call], reason
    one.fix.revert(tmp_path)
    assert one.files() == first


def test_lock_is_on_the_file_that_is_there_now(engine: Engine, tmp_path: Path) -> None:
    """A run that waited for a file that was replaced meanwhile looks at the new one."""
    fixstore: Any = sys.modules["fixstore"]
    assert load(engine.fix.name).name == engine.fix.name
    new = tmp_path / "new.py"
    new.write_bytes(engine.read() + b"# another\n")
    real = fixstore.fcntl.flock

    def replaced_meanwhile(descriptor: int, how: int) -> None:
        real(descriptor, how)
        if new.exists():
            os.replace(new, engine.file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixstore.fcntl, "flock", replaced_meanwhile)
        assert engine.fix.apply(engine.root).changed
    assert engine.read().endswith(b"# another\n")
