"""What an engine says about prompts, down to the bits, and where two of its answers part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from loadproof import LLM, RequestOutput, SamplingParams
from loadproof.engine.output import PositionLogprobs
from loadproof.engine.prompts import TokensPrompt

Entry = list[tuple[int, float, int]]
"""Token id, log-probability and rank, in order: the known token, then the best ones."""


@contextmanager
def engine(model: str | os.PathLike[str], isa: str, **settings: Any) -> Iterator[LLM]:
    """A model at one instruction-set level, with blocks of 16 and two threads unless told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADPROOF_ISA", isa)
        with LLM(model, **{"num_threads": 2, "block_size": 16, "check_integrity": True, **settings}) as llm:
            yield llm


@dataclass(frozen=True)
class Scored:
    """A prompt's log-probabilities: an entry a token but the first."""

    entries: list[Entry]

    def best(self, k: int) -> Scored:
        """What a request for ``k`` best tokens gets, where this one asked for more."""
        return Scored([[entry[0], *(one for one in entry[1:] if one[2] <= k)] for entry in self.entries])


def entry_of(position: PositionLogprobs | None) -> Entry:
    """What one position's dict holds, in its order."""
    assert position is not None
    return [(token_id, one.logprob, one.rank) for token_id, one in position.items()]


def scored(output: RequestOutput) -> Scored:
    """An output's prompt, whose first token has no entry."""
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(output.prompt_token_ids)
    assert found[0] is None
    return Scored([entry_of(one) for one in found[1:]])


def score(llm: LLM, prompts: Sequence[list[int]], k: int, *, max_tokens: int = 1) -> list[Scored]:
    """Score all prompts in one call."""
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=k)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [scored(output) for output in llm.generate(asked, params, use_tqdm=False)]


def score_alone(llm: LLM, prompts: Sequence[list[int]], k: int) -> list[Scored]:
    """Score each prompt in a call of its own."""
    return [score(llm, [prompt], k)[0] for prompt in prompts]


def first_parting(found: Sequence[Scored], expected: Sequence[Scored]) -> str | None:
    """The first prompt and position whose entries are not the same in every bit, in words."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for at, (ours, theirs) in enumerate(zip(one.entries, other.entries, strict=True), 1):
            if ours != theirs:
                return f"prompt {number}, token {at}: {ours}, alone {theirs}"
    return None


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """In float64, along the last axis."""
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    return np.asarray(exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True)), np.float64)
