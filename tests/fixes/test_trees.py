"""Where engines lie: installed, editable, checked out, read-only, linked, cached, half there."""

from __future__ import annotations

import fcntl
import json
import os
import py_compile
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixes.engines import ASYNC, RESUMED, Engine, in_child, install, is_root, record


def test_source_checkout(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path, name, release=None)
    (tmp_path / "pyproject.toml").write_text("")
    first = engine.files()

    report = engine.fix.apply(tmp_path)
    assert (report.status, report.release, report.kind) == ("applied", None, "checkout")
    engine.fix.revert(tmp_path)
    assert engine.files() == first


def test_source_checkout_that_says_its_release(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path, name, release=None)
    (tmp_path / "setup.py").write_text("")
    record(tmp_path, "9.9", folder="vllm_gaudi.egg-info")
    (tmp_path / "vllm_gaudi.egg-info" / "METADATA").rename(tmp_path / "vllm_gaudi.egg-info" / "PKG-INFO")

    report = engine.fix.check(tmp_path)
    assert report.status == "drifted"
    assert "9.9" in report.reason


def test_sources_under_src(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path / "src", name, release=None)
    (tmp_path / "pyproject.toml").write_text("")

    assert engine.fix.check(tmp_path).file == str(engine.file)


def test_package_of_unknown_release(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path, name, release=None)

    report = engine.fix.check(tmp_path)
    assert report.status == "drifted"
    assert "is unknown" in report.reason
    assert engine.fix.check(tmp_path, any_release=True).status == "not applied"


def test_package_of_two_releases(engine: Engine) -> None:
    record(engine.root, "0.26.0")

    report = engine.fix.check(engine.root)
    assert report.status == "drifted"
    assert "0.26.0, 0.30.0" in report.reason


@pytest.mark.parametrize("text", [None, "", "Name: vllm-gaudi\n", "\n\nVersion\n", "Version:\nName: x\n"])
def test_package_whose_record_says_no_release(engine: Engine, text: str | None) -> None:
    metadata = engine.root / "vllm_gaudi-0.30.0.dist-info" / "METADATA"
    metadata.unlink()
    if text is not None:
        metadata.write_text(text)

    report = engine.fix.check(engine.root)
    assert report.status == "drifted"
    assert "is unknown" in report.reason


@pytest.mark.parametrize("record", [b"{", b"[]", b'{"dir_info": 1}', b'"\xff"'])
def test_broken_record_of_an_editable_install(tmp_path: Path, name: str, record: bytes) -> None:
    engine = install(tmp_path / "my checkout", name, release=None)
    site = editable(engine, tmp_path)
    broken = site / "vllm_gaudi-0.30.0.dist-info" / "direct_url.json"
    broken.write_bytes(record)

    for report in (engine.fix.check(site), engine.fix.apply(site)):
        assert report.status == "drifted"
        assert str(broken) in report.reason


def test_record_that_isnt_text(engine: Engine) -> None:
    metadata = engine.root / "vllm_gaudi-0.30.0.dist-info" / "METADATA"
    metadata.write_bytes(b"Version: 0.30.0\nAuthor: \xe9\n")

    for report in (engine.fix.check(engine.root), engine.fix.apply(engine.root)):
        assert report.status == "drifted"
        assert str(metadata) in report.reason


def test_check_that_cant_read_doesnt_say_not_applied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    report = engine.fix.check(engine.root)
    assert report.status == "drifted"
    assert f"{engine.file}: Permission denied" in report.reason


def test_no_package(engine: Engine, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for root in (empty, tmp_path / "missing", engine.file):
        report = engine.fix.apply(root)
        assert report.status == "drifted"
        assert str(root) in report.reason
        assert engine.fix.revert(root).status == "drifted"


def test_package_without_the_file(engine: Engine) -> None:
    engine.file.unlink()
    engine.file.mkdir()

    report = engine.fix.apply(engine.root)
    assert report.status == "drifted"
    assert "0.30.0" in report.reason
    assert engine.fix.facts.file in report.reason


def test_installed_package_is_found_without_import(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(engine.root))

    report = engine.fix.apply()  # importing the package would raise
    assert (report.status, report.kind, report.file) == ("applied", "installed", str(engine.file))
    assert "vllm_gaudi" not in sys.modules


def test_no_package_installed(engine: Engine) -> None:
    report = engine.fix.check()
    assert report.status == "drifted"
    assert f"isn't installed for {sys.executable}" in report.reason


def editable(engine: Engine, tmp_path: Path) -> Path:
    """A site-packages folder that has the engine as an editable install."""
    site = tmp_path / "editable site"
    site.mkdir()
    info = record(site, "0.30.0")
    origin = {"url": engine.root.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    return site


def test_editable_install_changes_its_checkout(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install(tmp_path / "my checkout", name, release=None)
    monkeypatch.syspath_prepend(str(engine.root))  # what the install's .pth file does
    monkeypatch.syspath_prepend(str(editable(engine, tmp_path)))

    report = engine.fix.apply()
    assert (report.status, report.kind, report.release) == ("applied", "editable", "0.30.0")
    assert report.file == str(engine.file)


def test_editable_site_packages_say_where_the_sources_are(tmp_path: Path, name: str) -> None:
    engine = install(tmp_path / "my checkout", name, release=None)

    report = engine.fix.apply(editable(engine, tmp_path))
    assert report.status == "drifted"
    assert f"--root '{engine.root}'," in report.reason


@pytest.mark.parametrize("cache_name", ["cache.py", "it's.py"])
def test_linked_file_is_refused(engine: Engine, tmp_path: Path, cache_name: str) -> None:
    cache = tmp_path / cache_name
    engine.file.rename(cache)
    engine.file.symlink_to(cache)
    first = engine.files()

    assert engine.fix.check(engine.root).status == "not applied"
    report = engine.fix.apply(engine.root)
    assert report.status == "failed"
    assert f"cp --remove-destination {shlex.quote(str(cache))} {engine.file}" in report.reason
    assert engine.files() == first
    assert engine.file.is_symlink()


@pytest.mark.parametrize("up", [0, 1, 2])
def test_linked_folder_within_the_root_is_refused(engine: Engine, tmp_path: Path, up: int) -> None:
    """What lies there may be another environment's, too."""
    folder = engine.file.parents[up]
    folder.rename(tmp_path / "shared")
    folder.symlink_to(tmp_path / "shared")
    first = engine.read()

    assert engine.fix.check(engine.root).status == "not applied"
    report = engine.fix.apply(engine.root)
    assert report.status == "failed"
    assert f"{folder} is a link to {tmp_path / 'shared'}" in report.reason
    assert engine.read() == first
    assert not (engine.file.parent / ".loadproof-fixes").exists()


def test_default_and_root_agree_on_several_records(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    record(engine.root, "0.25.0")
    monkeypatch.syspath_prepend(str(engine.root))

    assert engine.fix.check() == engine.fix.check(engine.root)
    assert engine.fix.check().status == "drifted"


def test_record_of_another_place_says_nothing(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that comes first on the path has no release, whatever is installed behind it."""
    shadow = install(tmp_path / "shadow", engine.fix.name, release=None)
    monkeypatch.syspath_prepend(str(engine.root))
    monkeypatch.syspath_prepend(str(shadow.root))

    assert engine.fix.check() == engine.fix.check(shadow.root)
    assert "is unknown" in engine.fix.check().reason
    (shadow.root / "pyproject.toml").write_text("")
    assert engine.fix.check() == engine.fix.check(shadow.root)
    assert engine.fix.check().kind == "checkout"


def test_linked_folder_is_followed(engine: Engine, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(engine.root)

    assert engine.fix.apply(link).status == "applied"
    assert engine.fix.check(engine.root).status == "applied"


def test_hard_link_keeps_the_cache(engine: Engine, tmp_path: Path) -> None:
    cache = tmp_path / "cache.py"
    os.link(engine.file, cache)
    first = engine.read()

    assert engine.fix.apply(engine.root).status == "applied"
    assert cache.read_bytes() == first != engine.read()


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755])
def test_mode_stays(engine: Engine, mode: int) -> None:
    engine.file.chmod(mode)
    engine.fix.apply(engine.root)
    assert stat.S_IMODE(engine.file.stat().st_mode) == mode
    engine.fix.revert(engine.root)
    assert stat.S_IMODE(engine.file.stat().st_mode) == mode


@pytest.mark.skipif(not is_root(), reason="only root gives files away")
def test_owner_stays(engine: Engine) -> None:
    os.chown(engine.file, 1234, 4321)
    os.chown(engine.file.parent, 1234, 4321)
    engine.fix.apply(engine.root)

    kept = engine.file.parent / ".loadproof-fixes"
    for path in (engine.file, kept, *kept.iterdir()):
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_extended_attributes_stay(engine: Engine) -> None:
    try:
        os.setxattr(engine.file, "user.note", b"ours")
    except OSError:
        pytest.skip("the file system has no extended attributes")
    engine.fix.apply(engine.root)
    assert os.getxattr(engine.file, "user.note") == b"ours"


@pytest.fixture
def public(name: str) -> Iterator[Engine]:
    """A faulty engine that every user comes to: pytest closes its own folders to all but their owner."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield install(Path(folder), name)


@pytest.mark.parametrize("mode", [0o444, 0o400])
def test_owner_of_a_read_only_file_applies(public: Engine, mode: int) -> None:
    first = public.files()
    if is_root():
        for path in (public.root, *public.root.rglob("*")):
            os.chown(path, 65534, 65534)
    public.file.chmod(mode)

    def act(call: str) -> bytes:
        if is_root():
            drop_root()
        return json.dumps(getattr(public.fix, call)(public.root)).encode()

    report = json.loads(in_child(lambda: act("apply"))[1])
    assert report[1] == "applied", report
    assert stat.S_IMODE(public.file.stat().st_mode) == mode
    assert json.loads(in_child(lambda: act("revert"))[1])[3]
    assert public.files() == first


@pytest.mark.parametrize(
    ("error", "is_advised"), [(13, True), (1, True), (30, True), (28, False), (5, False)]
)
def test_only_refusals_are_answered_with_the_owner(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: int, is_advised: bool
) -> None:
    def refused(descriptor: int, *_: object) -> None:
        raise OSError(error, os.strerror(error), descriptor)

    monkeypatch.setattr(os, "fchmod", refused)
    report = engine.fix.apply(engine.root)
    assert report.status == "failed"
    assert report.reason.startswith(f"the tree: {os.strerror(error)}: nothing was changed")
    assert ("owner" in report.reason) == is_advised


def test_lock_that_wants_to_write(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems, which lock nothing that is only read."""
    fixstore: Any = sys.modules["fixstore"]
    real = fixstore.fcntl.flock

    def on_network(descriptor: int, how: int) -> None:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(9, "Bad file descriptor")
        real(descriptor, how)

    monkeypatch.setattr(fixstore.fcntl, "flock", on_network)
    assert engine.fix.apply(engine.root).changed


def drop_root() -> None:
    """Leave root, so that permissions bind."""
    os.setgid(65534)
    os.setuid(65534)


@pytest.mark.parametrize("what", ["file", "folder", "tree"])
def test_read_only_tree_is_left_and_said(public: Engine, what: str) -> None:
    """In a child that isn't root, since permissions don't bind root."""
    for path in public.root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if what == "folder":
        public.file.chmod(0o666)
    if what == "file":
        public.file.parent.chmod(0o777)
    first = public.files()

    def act() -> bytes:
        if is_root():
            drop_root()
        return json.dumps(public.fix.apply(public.root)).encode()

    found = json.loads(in_child(act)[1])
    assert found[1] == "failed"
    assert "nothing was changed" in found[2]
    assert public.files() == first
    assert public.fix.check(public.root).status == "not applied"


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_stale_compiled_files_go(engine: Engine, mode: py_compile.PycInvalidationMode) -> None:
    """Unchecked ones would be run for ever, whatever the source says."""
    cached = Path(str(py_compile.compile(str(engine.file), doraise=True, invalidation_mode=mode)))
    beside = engine.file.with_suffix(".pyc")
    other = cached.with_name(f"{engine.file.stem}.cpython-39.opt-1.pyc")
    neighbour = cached.with_name("hpu_other.cpython-39.pyc")
    for path in (beside, other, neighbour):
        path.write_bytes(cached.read_bytes())

    engine.fix.apply(engine.root)
    assert [path for path in (cached, beside, other) if path.exists()] == []
    assert neighbour.exists()


def test_compiled_files_elsewhere_go(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    cached = Path(str(py_compile.compile(str(engine.file), doraise=True)))
    assert cached.is_relative_to(tmp_path / "cache")

    engine.fix.apply(engine.root)
    assert not cached.exists()


def test_both_fixes_in_one_folder(tmp_path: Path) -> None:
    one = install(tmp_path, RESUMED)
    two = install(tmp_path, ASYNC, release=None)
    first = one.files()
    one.fix.apply(tmp_path)
    two.fix.apply(tmp_path)
    one.fix.revert(tmp_path)

    assert two.fix.check(tmp_path).status == "applied"
    assert two.fix.revert(tmp_path).changed
    assert one.files() == first
