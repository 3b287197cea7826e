"""Large reads in pieces that stay in the processor's cache, shared out over a few threads.

NumPy and hashlib release the interpreter lock while they work, so plain threads do. The pieces are
independent, so results never depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loadproof.weights.tensors import BF16

CHUNK = 1 << 16  # elements; as float32 they fit a second-level cache
_HASH_PIECE = 1 << 22  # bytes
_MAX_THREADS = 8


def run_shares(count: int, smallest: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(start, stop)`` over ``range(count)``, one share a processor, none below ``smallest``.

    Returns when every share is done; raises what a share raised. ``work`` must not call this again.
    """
    shares = max(1, min(_num_threads(), count // smallest))
    bounds = [count * i // shares for i in range(shares + 1)]
    others = [_pool().submit(work, bounds[i], bounds[i + 1]) for i in range(1, shares)]
    try:
        work(0, bounds[1])
    finally:
        wait(others)
    for other in others:
        other.result()


def pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut ``start..stop`` into slices of ``size``, the last one shorter."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


def rounded_bf16(values: npt.NDArray[Any]) -> BF16:
    """A new bfloat16 array of the same shape; each value rounded to nearest even."""
    out = np.empty(values.shape, ml_dtypes.bfloat16)
    flat, rounded = values.reshape(-1), out.reshape(-1)

    def share(start: int, stop: int) -> None:
        with np.errstate(all="ignore"):  # a NaN stays one; no warning helps
            for piece in pieces(start, stop, CHUNK):
                rounded[piece] = flat[piece].astype(np.float32, copy=False)

    run_shares(flat.size, CHUNK, share)
    return out


def tree_digest(buffers: Iterable[memoryview]) -> str:
    """SHA-256 hex digest over the SHA-256 digests of each buffer's 4 MiB pieces, in order.

    It changes whenever a byte does, like a plain SHA-256, and is computed on every processor.
    """
    parts = [buffer[piece] for buffer in buffers for piece in pieces(0, len(buffer), _HASH_PIECE)]
    digests = [b""] * len(parts)

    def share(start: int, stop: int) -> None:
        for i in range(start, stop):
            digests[i] = hashlib.sha256(parts[i]).digest()

    run_shares(len(parts), 1, share)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _num_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return min(_MAX_THREADS, os.cpu_count() or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _num_threads() - 1), thread_name_prefix="loadproof-weights")


# A forked child has the pool object but none of its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
