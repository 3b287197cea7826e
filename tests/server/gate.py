"""Holds an engine in the middle of an answer, so that what happens then needs no luck with times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loadproof import LLM


class Gate:
    """Lets the engine make so many tokens, and no more until it is opened."""

    def __init__(self, num_tokens: int) -> None:
        self._left = threading.Semaphore(num_tokens)
        self._open = threading.Event()

    def __call__(self, *_: object) -> None:
        while not self._open.is_set() and not self._left.acquire(timeout=0.005):
            pass

    def open(self) -> None:
        self._open.set()


@contextmanager
def gate(llm: LLM, num_tokens: int) -> Iterator[Gate]:
    """Let the engine make so many tokens; the gate opens at the end of the block, if not before."""
    held = Gate(num_tokens)
    llm.on_logits(held)
    try:
        yield held
    finally:
        held.open()
        llm.on_logits(None)
