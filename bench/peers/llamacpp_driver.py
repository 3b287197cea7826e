"""Drives llama.cpp's own batched benchmark, run for each request; the argument is the peers' directory.

The tool draws its own tokens, so only the sizes of the prompts are passed on. It times the prompts and the
decoding apart, without start and loading, and both are added. The prompts' last logits are the first output
token, so decoding is one step less than there are outputs. A run with one sequence comes before the one that
counts, since the first touches memory that the other engines touched rounds ago.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from protocol import Answer, Served, run

CONTEXT_UNIT = 256  # the tool rounds each sequence's part of the context to this


class ToolError(RuntimeError):
    """The benchmark failed, or printed no result."""


def load(peers: str) -> Served:
    tool = Path(peers, "llamacpp", "build", "bin", "llama-batched-bench")
    model = Path(peers, "smollm2-bf16.gguf")

    def complete(prompts: list[list[int]], output_len: int) -> Answer:
        num_prompts, input_len = len(prompts), len(prompts[0])
        num_steps = output_len - 1
        result = _bench(tool, model, num_prompts, input_len, max(num_steps, 1))
        decoding = result["t_tg"] if num_steps else 0.0
        return Answer(result["t_pp"] + decoding, num_prompts * output_len)

    return Served(_version(tool), complete)


def _bench(tool: Path, model: Path, num_prompts: int, input_len: int, num_steps: int) -> dict[str, float]:
    """The tool's figures for one shape; ``t_pp`` and ``t_tg`` are seconds."""
    per_sequence = -(-(input_len + num_steps) // CONTEXT_UNIT) * CONTEXT_UNIT
    sizes = {
        "-m": model,
        "-t": len(os.sched_getaffinity(0)),
        "-c": num_prompts * per_sequence,
        "-b": 2048,
        "-npp": input_len,
        "-ntg": num_steps,
        "-npl": f"1,{num_prompts}",
        "--output-format": "jsonl",
    }
    arguments = [str(part) for pair in sizes.items() for part in pair]
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(results) != 2:
        raise ToolError(f"{tool.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    last: dict[str, float] = results[-1]
    return last


def _version(tool: Path) -> str:
    done = subprocess.run([str(tool), "--version"], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.removeprefix("version:").strip() for line in lines if "version" in line), "unknown")


if __name__ == "__main__":
    run(load)
