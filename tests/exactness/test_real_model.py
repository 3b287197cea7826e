"""64 chat prompts on the real model: every answer is the one that the prompt gets alone, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """What of the prompts a level answers: all 64, except at the portable level, which takes a few.

    ``LOADPROOF_EXACTNESS=full`` (``make exactness``) gives every level all of them, and more tokens.
    """

    every: int = 1
    longest: int = MAX_MODEL_LEN  # prompt tokens
    max_tokens: int = 16


if os.environ.get("LOADPROOF_EXACTNESS") == "full":
    SHARES, OTHER = {LEVELS[0]: Share(max_tokens=32), "portable": Share(max_tokens=4)}, Share()
else:
    SHARES, OTHER = {LEVELS[0]: Share(), "portable": Share(12, 60, 2)}, Share(max_tokens=4)


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


@pytest.fixture(scope="module", params=LEVELS)
def baseline(request: pytest.FixtureRequest, smollm2: Path) -> Baseline:
    isa: str = request.param
    with engine(isa) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        every = [list(llm.chat_prompt(chat).token_ids) for chat in chats]
        share = SHARES.get(isa, OTHER)
        numbers = [i for i, ids in enumerate(every) if len(ids) <= share.longest][:: share.every]
        common = {"max_tokens": share.max_tokens, "ignore_eos": True, "logprobs": 0}
        params = [SamplingParams(seed=1000 + i, **{**common, **SAMPLING[i % len(SAMPLING)]}) for i in numbers]
        prompts = [every[i] for i in numbers]
        return Baseline(isa, prompts, params, record_alone(llm, prompts, params))


def check(baseline: Baseline, llm: LLM, order: list[int], variant: str) -> None:
    """Answer the prompts in one call, in ``order``."""
    found = record(llm, [baseline.prompts[i] for i in order], [baseline.params[i] for i in order])
    answers = [found[order.index(i)] for i in range(len(order))]
    problem = first_parting(answers, baseline.answers)
    assert problem is None, f"{baseline.isa}, {variant}: {problem}"


def in_order(baseline: Baseline) -> list[int]:
    return list(range(len(baseline.prompts)))


def test_the_answers_are_worth_comparing(baseline: Baseline) -> None:
    answers = {tuple(answer.tokens) for answer in baseline.answers}
    assert len(answers) >= 0.9 * len(baseline.answers)
    max_tokens = SHARES.get(baseline.isa, OTHER).max_tokens
    assert [len(answer.logits) for answer in baseline.answers] == [max_tokens] * len(baseline.prompts)
    if baseline.isa != "portable":
        assert len(baseline.prompts) == 64


def test_a_batch_in_any_order(baseline: Baseline) -> None:
    with engine(baseline.isa) as llm:
        check(baseline, llm, in_order(baseline), "one batch")
        shuffled = np.random.default_rng(3).permutation(len(baseline.prompts)).tolist()
        check(baseline, llm, shuffled, "shuffled")


@pytest.mark.parametrize("budget", [16, 64])
def test_token_budgets(baseline: Baseline, budget: int) -> None:
    with engine(baseline.isa, max_num_batched_tokens=budget) as llm:
        check(baseline, llm, in_order(baseline), f"a budget of {budget} tokens")


@pytest.mark.parametrize("threads", [1, 4])
def test_threads(baseline: Baseline, threads: int) -> None:
    with engine(baseline.isa, num_threads=threads) as llm:
        check(baseline, llm, in_order(baseline), f"{threads} threads")


@pytest.mark.parametrize("block_size", [16, 64])
def test_block_sizes_and_fewer_sequences(baseline: Baseline, block_size: int) -> None:
    with engine(baseline.isa, block_size=block_size, max_num_seqs=block_size // 3) as llm:
        check(baseline, llm, in_order(baseline), f"blocks of {block_size}")


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
