"""The servers of ``serving_side_by_side.py``: how each is started, and one that runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from engines import OURS, PATIENCE, EngineError, Program, last_words

NAMES = (OURS, "llamacpp", "vllm")
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 2048
MEMORY_SHARE = 0.3  # of the machine's, for vLLM; the default leaves no room for other servers


@dataclass(frozen=True)
class ServerCommand(Program):
    """A server: its command without the port, which ``--port`` names, and variables that it needs."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def known_servers(model: str, peers: Path) -> dict[str, ServerCommand]:
    """Every server by name, each for 64 sequences of SmolLM2-135M-Instruct in bf16 on all cores."""
    threads = os.sched_getaffinity(0)
    llamacpp, gguf = peers / "llamacpp/build/bin/llama-server", peers / "smollm2-bf16.gguf"
    vllm, directory = peers / "vllm/bin/python", peers / "smollm2"
    lengths = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    start = "import sys; from loadproof.cli import main; sys.exit(main())"
    llama_arguments = [
        *("-m", str(gguf), "--threads", str(len(threads)), "--parallel", str(MAX_NUM_SEQS), "--no-webui"),
        *("--ctx-size", str(MAX_NUM_SEQS * 512)),  # of which each sequence gets its part
    ]
    vllm_arguments = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--dtype", "bfloat16"),
        *(*lengths, "--max-num-batched-tokens", "2048", "--gpu-memory-utilization", str(MEMORY_SHARE)),
    ]
    cores = ",".join(map(str, sorted(threads)))
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    servers = [
        ServerCommand(OURS, (), [sys.executable, "-c", start, "serve", model, *lengths]),
        ServerCommand("llamacpp", (llamacpp, gguf), [str(llamacpp), *llama_arguments]),
        ServerCommand("vllm", (vllm, directory), [str(vllm), *vllm_arguments], variables),
    ]
    return {server.name: server for server in servers}


@contextmanager
def running(server: ServerCommand) -> Iterator[str]:
    """Start a server on a free port, and give its URL once it is ready; it ends with the block.

    Raises :class:`EngineError` with its last words where it ends, or isn't ready in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*server.command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=server.environment | server.variables,
        )
        try:
            end = time.monotonic() + PATIENCE
            while not _healthy(url):
                code = process.poll()
                if code is not None or time.monotonic() > end:
                    what = "wasn't ready in time" if code is None else f"ended with code {code}"
                    raise EngineError(f"{server.name} {what}; it last said:\n{last_words(log)}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
