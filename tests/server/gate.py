"""Holds or slows an engine in the middle of an answer: what happens then needs no luck with times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loadproof import LLM
from loadproof.devices.device import StepBatch, SubmittedStep


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


@contextmanager
def slowed(llm: LLM, seconds: float = 0.02) -> Iterator[None]:
    """Have each step take so long until the block ends: requests of many steps take minutes unless cut."""
    over = threading.Event()
    submit = llm.engine.device.submit

    def submitting(batch: StepBatch) -> SubmittedStep:
        over.wait(seconds)
        return submit(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.device, "submit", submitting)
        try:
            yield
        finally:
            over.set()
