"""The simulated model: a token is a hash of its whole prefix, and so a request's tokens follow from it alone.

A prefix is named by one integer of 64 bits, made of the name of the prefix one token shorter and its last
token. Multiplying by an odd constant and folding the upper bits down is Knuth's multiplicative hashing (The
Art of Computer Programming, 6.4); the arithmetic is written out so that a seed replays on any Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from loadproof.devices.device import ScoreResult
from loadproof.engine.request import FinishReason, Request

VOCAB_SIZE = 61
ROOT = 0x243F6A8885A308D3  # the prefix without tokens
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


def extend(prefix: int, token: int) -> int:
    """The name of a prefix with one more token."""
    mixed = (prefix ^ token) * _FACTOR & _MASK
    return mixed ^ mixed >> 29


def draw(prefix: int, noise: int, banned: Collection[int]) -> int:
    """The token after a prefix; ``noise`` stands for all that sampling parameters add to it."""
    token = extend(prefix, noise) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def noise_of(temperature: float, seed: int, position: int) -> int:
    """What seed and position add to a draw; nothing at temperature 0."""
    return (seed * 31 + position) & _MASK if temperature else 0


def history_noise(tokens: Sequence[int], num_prompt: int) -> int:
    """What the tokens so far add to a draw where the request uses a penalty."""
    return crc32(array("i", tokens).tobytes()) + num_prompt


def scores_of(prefixes: Sequence[int], targets: Sequence[int], num_top: Sequence[int]) -> ScoreResult:
    """What stands for the log-probabilities of each target after its prefix, and of the best tokens."""
    names = np.array(prefixes, np.uint64)
    mixed = (names ^ np.array(targets, np.uint64)) * np.uint64(_FACTOR)
    mixed ^= mixed >> np.uint64(29)
    counts = np.array(num_top, np.int64)
    owners = np.repeat(names, counts)
    places = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    return ScoreResult(
        -(mixed & np.uint64(0xFFFFF)).astype(np.float32),
        (mixed >> np.uint64(20)).astype(np.int32) % VOCAB_SIZE + np.int32(1),
        ((owners ^ places) % np.uint64(VOCAB_SIZE)).astype(np.int32),
        -((owners >> np.uint64(9) & np.uint64(0xFFFF)) + places).astype(np.float32),
    )


@dataclass(slots=True)
class Truth:
    """What a request's tokens must be, prompt and output, and how it must end.

    ``cut`` is the output length at which the host ends it, as a stop string does. ``tokens`` and ``prefixes``
    (by position: the name of the prefix that ends there) reach one token past the end: with a step in
    flight, that one may be computed in vain.
    """

    request: Request
    cut: int | None = None
    tokens: list[int] = field(init=False)
    prefixes: list[int] = field(init=False)
    num_output: int = field(init=False)
    finish: tuple[FinishReason, int | str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.prefixes = []
        name = ROOT
        for token in self.tokens:
            name = extend(name, token)
            self.prefixes.append(name)
        for length in range(1, self.request.max_tokens + 1):
            self._grow()
            finish = self._finish_at(length)
            if finish is not None:
                self.num_output, self.finish = length, finish
                break
        self._grow()

    @property
    def output(self) -> list[int]:
        """The tokens that the request must end with."""
        start = self.request.num_prompt_tokens
        return self.tokens[start : start + self.num_output]

    def _grow(self) -> None:
        request, params, position = self.request, self.request.params, len(self.tokens)
        noise = noise_of(params.temperature, request.seed, position)
        if params.uses_penalties:
            noise += history_noise(self.tokens, request.num_prompt_tokens)
        early = position - request.num_prompt_tokens < params.min_tokens
        banned = request.eos_token_ids | request.stop_token_ids if early else ()
        token = draw(self.prefixes[-1], noise, banned)
        self.tokens.append(token)
        self.prefixes.append(extend(self.prefixes[-1], token))

    def _finish_at(self, length: int) -> tuple[FinishReason, int | str | None] | None:
        token = self.tokens[-1]
        if token in self.request.eos_token_ids:
            return "stop", None
        if token in self.request.stop_token_ids:
            return "stop", token
        if length == self.request.max_tokens:
            return "length", None
        return ("stop", "cut") if length == self.cut else None
