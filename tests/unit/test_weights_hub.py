"""Models named by a hub id, from a hub of our own on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from loadproof.weights import hub
from loadproof.weights.hub import HubId, parse_hub_id
from loadproof.weights.resolve import ModelNotFoundError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("org/name", None, None)),
        ("org/name@v1.0", HubId("org/name", "v1.0", None)),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1", None)),
        ("org/name:m.Q4_K_M.gguf", HubId("org/name", None, "m.Q4_K_M.gguf")),
        ("org/name@main:sub/m.gguf", HubId("org/name", "main", "sub/m.gguf")),
        ("name", None),
        ("/org/name", None),
        ("org/name/more", None),
        ("org/na me", None),
        ("org/name:../m.gguf", None),
        ("org/name:*.gguf", None),
        ("-org/name", None),
    ],
)
def test_hub_ids(name: str, expected: HubId | None) -> None:
    assert parse_hub_id(name) == expected


HUB_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the weights once more",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "sub/m.Q4_0.gguf": b"GGUF...",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(BaseHTTPRequestHandler):
    """The few requests of the hub's interface that a download makes; ``org/name`` alone exists."""

    asked: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        body = self.body(path)
        self.send_response(404 if body is None else 200)
        if body is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(body or b"").hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if body is not None and self.command == "GET":
            self.wfile.write(body)

    def body(self, path: str) -> bytes | None:
        if path.startswith("/api/models/org/name/tree/"):
            return json.dumps(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in HUB_FILES.items()
                ]
            ).encode()
        if path.startswith("/api/models/org/name"):
            files = [{"rfilename": name} for name in HUB_FILES]
            return json.dumps({"id": "org/name", "sha": COMMIT, "siblings": files}).encode()
        prefix = f"/org/name/resolve/{COMMIT}/"
        return HUB_FILES.get(path.removeprefix(prefix)) if path.startswith(prefix) else None

    def log_message(self, *_: object) -> None:
        pass


RESOLVE = "import sys; from loadproof.weights.resolve import resolve_model; print(resolve_model(sys.argv[1]))"


@dataclass
class Hub:
    """A hub on the loopback interface; each model is resolved in a process of its own.

    huggingface_hub reads its environment when it is imported, so it has to be a new process.
    """

    home: Path
    endpoint: str
    asked: list[str]

    def resolve(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "NO_PROXY": "127.0.0.1"}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        return subprocess.run(
            [sys.executable, "-c", RESOLVE, name],
            env=kept
            | {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            | settings
            | environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    class Handler(HubHandler):
        asked: ClassVar[list[str]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Hub(tmp_path, f"http://127.0.0.1:{server.server_port}", Handler.asked)
        finally:
            server.shutdown()
            thread.join()


def test_hub_model_without_code_or_pickles_and_then_offline(served: Hub) -> None:
    done = served.resolve("org/name")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert folder.is_relative_to(served.home)
    assert not any(name.endswith((".py", ".bin")) for name in served.asked)
    asked = len(served.asked)
    again = served.resolve("org/name", HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout
    assert len(served.asked) == asked


def test_hub_gguf_file(served: Hub) -> None:
    done = served.resolve("org/name:sub/m.Q4_0.gguf")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == b"GGUF..."


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("org/none", {}, "org/none could not be had from the Hugging Face hub, nor from its local cache"),
        ("org/name:absent.gguf", {}, "org/name on the Hugging Face hub has no file absent.gguf"),
        ("org/name", {"HF_HUB_OFFLINE": "1"}, "Without a network, give the path"),
        ("org/name@v2", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "org/name at revision v2 could not be had"),
    ],
)
def test_hub_that_has_it_not(served: Hub, name: str, environment: dict[str, str], message: str) -> None:
    done = served.resolve(name, **environment)
    assert done.returncode == 1
    assert "ModelNotFoundError" in done.stderr
    assert message in done.stderr


def test_hub_repository_of_gguf_files_only(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json .* name the file: org/name:FILE\.gguf"):
        hub._usable(HubId("org/name", None, None), tmp_path)
