"""Prompt log-probabilities of every architecture at every level: the same bits always, and transformers' own.

The tiny models' weights are bf16 numbers, so what separates them from transformers' float32 goldens is the
rounding of what enters products: as much as rounding alone moves the oracle's (tests/unit/test_native_plan.py
holds logits to that), and an error of all logits alike cancels in a log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exactness.scoring import Scored, engine, first_parting, log_softmax, score, score_alone
from tests.tiny_models import TINY, write_model
from tests.unit.test_native_plan import LARGEST_ROOM, MEAN_SQUARE_ROOM, oracle, rounded_oracle

from loadproof import _native
from loadproof.devices.device import F32

LEVELS = _native.available_levels()
LENGTH = 120
K = 6
each_model = pytest.mark.parametrize("name", TINY)
each_level = pytest.mark.parametrize("isa", LEVELS)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: write_model(root / name, name))


def prompts_of(name: str) -> list[list[int]]:
    """A few, most of which begin alike; some end where a block does."""
    tokens = np.random.default_rng(3).integers(2, TINY[name].graph.vocab_size, 400).tolist()
    lengths = [(0, 33), (32, 1), (32, 17), (48, 20), (32, 32), (0, 90)]
    return [
        tokens[:shared] + tokens[100 + 20 * at : 100 + 20 * at + own]
        for at, (shared, own) in enumerate(lengths)
    ]


# Every architecture at the best level, two of them at the others.
SUBJECTS = [(name, isa) for isa in LEVELS for name in TINY if isa == LEVELS[0] or name in ("llama", "gemma3")]


@pytest.mark.parametrize(("name", "isa"), SUBJECTS)
def test_the_same_bits_however_they_came_about(
    directory_of: Callable[[str], Path], name: str, isa: str
) -> None:
    directory, prompts = directory_of(name), prompts_of(name)
    common: dict[str, Any] = {"max_model_len": LENGTH}
    with engine(directory, isa, enable_prefix_caching=False, num_threads=1, **common) as llm:
        alone = score_alone(llm, prompts, K)
    small = {"num_blocks_override": -(-LENGTH // 16), "max_num_batched_tokens": 16}

    def check(found: list[Scored], variant: str, k: int = K) -> None:
        problem = first_parting(found, [answer.best(k) for answer in alone])
        assert problem is None, f"{name}, {isa}, {variant}: {problem}"

    with engine(directory, isa, **common) as llm:
        check(score(llm, prompts, 1), "a batch, one token", 1)
        check(score(llm, prompts[::-1], K)[::-1], "more tokens, warm")
        check(score(llm, prompts, 0), "fewer", 0)
    with engine(directory, isa, **common, **small) as llm:
        check(score_alone(llm, prompts, K), "16 tokens a step")
        check(score_alone(llm, prompts, K), "some evicted")
        first = score(llm, prompts[:4], K, max_tokens=LENGTH - 70)
        assert first_parting(first, alone[:4]) is None, f"{name}, {isa}, with preemptions"
        stats = llm.stats()
        assert stats["prefix_cache_evictions"] > 0
        assert stats["num_preemptions"] > 0
    with engine(directory, isa, prompt_logprobs_cache=False, max_num_batched_tokens=7, **common) as llm:
        check(score(llm, prompts, K), "7 tokens a step, no hidden states kept")


def table_of(scored: Scored) -> F32:
    """Log-probabilities of all tokens at each position but the last: ``[P - 1, vocab_size]``."""
    table = np.full((len(scored.entries), len(scored.entries[0])), np.nan, np.float32)
    for row, entry in zip(table, scored.entries, strict=True):
        for token, logprob, _ in entry:
            row[token] = logprob
    assert not np.isnan(table).any()
    return table


@cache
def rounding(name: str) -> tuple[float, float]:
    """Root of the mean square, and the largest, of what rounding alone does to the oracle's log-softmax."""
    pairs = zip(rounded_oracle(name), oracle(name), strict=True)
    errors = np.concatenate([log_softmax(a) - log_softmax(b) for a, b in pairs])
    return float(np.sqrt(np.square(errors).mean())), float(np.abs(errors).max())


@each_level
@each_model
def test_they_are_transformers_within_the_rounding_of_products(
    directory_of: Callable[[str], Path], name: str, isa: str
) -> None:
    cases = TINY[name].golden
    with engine(directory_of(name), isa, max_model_len=LENGTH, max_logprobs=-1) as llm:
        found = [table_of(one) for one in score(llm, [case.prompt for case in cases], -1)]
    expected = [log_softmax(case.logits[:-1]) for case in cases]
    errors = np.concatenate([ours - golden for ours, golden in zip(found, expected, strict=True)])
    mean_square, largest = rounding(name)
    assert np.sqrt(np.square(errors).mean()) < MEAN_SQUARE_ROOM * mean_square
    assert np.abs(errors).max() < LARGEST_ROOM * largest
