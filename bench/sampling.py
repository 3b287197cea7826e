"""Microseconds that the native sampler takes for one row, by settings and instruction-set level.

Usage: ``python bench/sampling.py [LEVEL ...]``; without arguments, every level of this machine. Rows are
normal logits of standard deviation 3 (a few hundred tokens hold most of the probability); each figure is the
lowest of several runs, the call's own cost taken off.
"""

from __future__ import annotations

import sys
import time
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from loadproof import _native

F32 = npt.NDArray[np.float32]
VOCAB_SIZES = (49152, 262144)
RUNS, REPEATS = 12, 11


class Arguments(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    history: npt.NDArray[np.int32]
    num_logprobs: int


CASES: dict[str, Arguments] = {
    "greedy": {"temperature": 0.0},
    "greedy, 20 logprobs": {"temperature": 0.0, "num_logprobs": 20},
    "greedy, penalty over 2000": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "history": np.arange(2000, dtype=np.int32),
    },
    "temperature": {"temperature": 0.8},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, temperature 5": {"top_p": 0.9, "temperature": 5.0},
}


def seconds(logits: F32, isa: str, arguments: Arguments, repeats: int) -> float:
    start = time.perf_counter()
    _native.sample_row(logits, isa=isa, repeats=repeats, **arguments)
    return time.perf_counter() - start


def microseconds(logits: F32, isa: str, arguments: Arguments) -> float:
    many = min(seconds(logits, isa, arguments, REPEATS) for _ in range(RUNS))
    one = min(seconds(logits, isa, arguments, 1) for _ in range(RUNS))
    return (many - one) / (REPEATS - 1) * 1e6


def main() -> None:
    levels = sys.argv[1:] or _native.available_levels()
    for size in VOCAB_SIZES:
        logits = (np.random.default_rng(0).standard_normal(size) * 3).astype(np.float32)
        print(f"{f'us a row of {size}':<28}" + "".join(f"{level:>14}" for level in levels))
        for name, arguments in CASES.items():
            figures = (microseconds(logits, level, arguments) for level in levels)
            print(f"{name:<28}" + "".join(f"{figure:>14.1f}" for figure in figures))
        print()


if __name__ == "__main__":
    main()
