"""64 chat prompts on the real model: every answer is the one that the prompt gets alone, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exactness.drive import LeakyDevice
from tests.exactness.transcript import Transcript, first_parting, record, record_alone

from loadproof import LLM, SamplingParams, _native

pytestmark = pytest.mark.real_model

PROMPTS: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())
LEVELS = _native.available_levels()
MAX_MODEL_LEN = 512

# How the prompts of a batch take turns; no two requests have the same seed.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "logprobs": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.05, "presence_penalty": 0.7},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 100, "frequency_penalty": -0.3},
    {"temperature": 1.0, "logit_bias": {198: -5.0, 28: 2.0}},
)


@dataclass(frozen=True)
class Share:
    """What of the prompts a level answers: the highest all 64, the others a third, the portable one a few.

    ``LOADPROOF_EXACTNESS=full`` (``make exactness``) gives every level all of them, more tokens, and every
    variation by itself.
    """

    every: int = 1
    longest: int = MAX_MODEL_LEN  # prompt tokens
    max_tokens: int = 16


FULL = os.environ.get("LOADPROOF_EXACTNESS") == "full"
if FULL:
    SHARES, OTHER = {LEVELS[0]: Share(max_tokens=32), "portable": Share(max_tokens=4)}, Share()
else:
    SHARES, OTHER = {LEVELS[0]: Share(), "portable": Share(12, 60, 2)}, Share(3, max_tokens=4)


@dataclass(frozen=True)
class Baseline:
    """Requests, and each one's answer alone, at one level."""

    isa: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[Transcript]


@contextmanager
def engine(isa: str, **settings: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADPROOF_ISA", isa)
        with LLM("smollm2-135m", **{"max_model_len": MAX_MODEL_LEN, "num_threads": 2, **settings}) as llm:
            yield llm


@cache
def answered_alone(isa: str) -> Baseline:
    with engine(isa) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        every = [list(llm.chat_prompt(chat).token_ids) for chat in chats]
        share = SHARES.get(isa, OTHER)
        numbers = [i for i, ids in enumerate(every) if len(ids) <= share.longest][:: share.every]
        common = {"max_tokens": share.max_tokens, "ignore_eos": True, "logprobs": 0}
        params = [SamplingParams(seed=1000 + i, **{**common, **SAMPLING[i % len(SAMPLING)]}) for i in numbers]
        prompts = [every[i] for i in numbers]
        return Baseline(isa, prompts, params, record_alone(llm, prompts, params))


@pytest.fixture
def baseline(isa: str, smollm2: Path) -> Baseline:
    """That of a level, which is the same for all its tests."""
    return answered_alone(isa)


each_level = pytest.mark.parametrize("isa", LEVELS)


@each_level
def test_the_answers_are_worth_comparing(baseline: Baseline) -> None:
    answers = {tuple(answer.tokens) for answer in baseline.answers}
    assert len(answers) >= 0.9 * len(baseline.answers)
    share = SHARES.get(baseline.isa, OTHER)
    assert [len(answer.logits) for answer in baseline.answers] == [share.max_tokens] * len(baseline.prompts)
    if share.longest == MAX_MODEL_LEN:
        assert len(baseline.prompts) == -(-64 // share.every)


@dataclass(frozen=True)
class Variation:
    """An engine's settings, and whether it gets the prompts in another order."""

    settings: dict[str, Any]
    shuffled: bool = False


EACH = {
    "one batch": Variation({}),
    "shuffled": Variation({}, shuffled=True),
    "a budget of 16": Variation({"max_num_batched_tokens": 16}),
    "a budget of 64": Variation({"max_num_batched_tokens": 64}),
    "1 thread": Variation({"num_threads": 1}),
    "4 threads": Variation({"num_threads": 4}),
    "blocks of 16": Variation({"block_size": 16, "max_num_seqs": 5}),
    "blocks of 64": Variation({"block_size": 64, "max_num_seqs": 21}),
}
# The same, several at a time: what the lower levels do by default.
TOGETHER = {
    "a budget of 16, 1 thread, blocks of 64": Variation(
        {"max_num_batched_tokens": 16, "num_threads": 1, "block_size": 64}
    ),
    "shuffled, a budget of 64, 4 threads, blocks of 16": Variation(
        {"max_num_batched_tokens": 64, "num_threads": 4, "block_size": 16, "max_num_seqs": 21}, shuffled=True
    ),
}
CASES = [
    pytest.param(isa, variation, id=f"{isa}-{name}")
    for isa in LEVELS
    for name, variation in (EACH if FULL or isa == LEVELS[0] else TOGETHER).items()
]


@pytest.mark.parametrize(("isa", "variation"), CASES)
def test_each_answer_is_the_one_alone(baseline: Baseline, variation: Variation) -> None:
    order = list(range(len(baseline.prompts)))
    if variation.shuffled:
        order = np.random.default_rng(3).permutation(len(order)).tolist()
    with engine(baseline.isa, **variation.settings) as llm:
        found = record(llm, [baseline.prompts[i] for i in order], [baseline.params[i] for i in order])
    answers = [found[order.index(i)] for i in range(len(order))]
    problem = first_parting(answers, baseline.answers)
    assert problem is None, f"{baseline.isa}, {variation}: {problem}"


@each_level
def test_a_leak_of_one_bit_is_found(baseline: Baseline) -> None:
    with engine(baseline.isa) as llm:
        few = slice(3)
        leaky = LeakyDevice(llm.engine.device)
        llm.engine._pipeline._device = leaky
        prompts, params = baseline.prompts[few], baseline.params[few]
        assert first_parting(record_alone(llm, prompts, params), baseline.answers[few]) is None
        problem = first_parting(record(llm, prompts, params), baseline.answers[few])
        assert problem is not None
        assert "generated token 0: logits" in problem
