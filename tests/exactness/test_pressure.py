"""Long requests on the real model with too few blocks: each answer is the one alone, bit for bit.

Nothing about preemption shows: not with prefixes cached or not, steps submitted ahead or not, whatever the
size of blocks, who goes first, and who is aborted. A run in which nobody gave way proves nothing, so each
counts how often that happened.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.exactness.pressure import Answer, Ask, Run, difference, drive, drive_alone

from loadproof import LLM, SamplingParams
from loadproof.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

PROMPTS: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())

# How the seeded requests take turns.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "logprobs": 5},
    {"temperature": 1.3, "min_p": 0.05, "presence_penalty": 0.7},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 100, "frequency_penalty": -0.3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.0, "logit_bias": {198: -5.0, 28: 2.0}},
)
# And the greedy ones: most have nothing, some a penalty, which makes them depend on all that was generated.
GREEDY: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {},
    {"repetition_penalty": 1.2},
    {},
    {"frequency_penalty": 0.5},
)


@dataclass(frozen=True)
class Size:
    """How much is asked.

    ``make exactness`` asks for all that; else there are fewer and shorter requests, of the same kinds.
    """

    num_greedy: int
    num_seeded: int
    longest: tuple[int, ...]  # tokens of a few prompts
    usual: tuple[int, int]  # tokens of the other prompts, beside what they share
    shared: tuple[int, ...]  # tokens of the beginnings that prompts share
    max_tokens: tuple[int, int]
    max_tokens_after_long: int  # few: the cache can't hold less than the longest request
    least_preemptions: float  # a request, on average

    @property
    def max_model_len(self) -> int:
        """The longest request there may be."""
        return max(self.longest) + self.max_tokens_after_long


FULL = os.environ.get("LOADPROOF_EXACTNESS") == "full"
# Answers far longer than most prompts: a request comes in when there are blocks for what is known of it, and
# gives way for what is not known then.
SIZE = (
    Size(64, 64, (1500, 900, 1200), (2, 20), (0, 0, 32, 100), (420, 560), 30, least_preemptions=2.0)
    if FULL
    else Size(8, 8, (138, 100), (2, 12), (0, 0, 32), (92, 106), 12, least_preemptions=0.6)
)


def requests(tokenizer: Tokenizer, size: Size, seed: int = 5) -> list[Ask]:
    """Greedy and seeded ones in turn, a few with long prompts, each some steps after the one before."""
    draw = random.Random(seed)
    corpus = [token for prompt in PROMPTS for token in tokenizer.encode(prompt)]
    while len(corpus) < 2 * size.max_model_len:
        corpus += corpus[::-1]

    def cut(count: int) -> list[int]:
        start = draw.randrange(len(corpus) - count)
        return corpus[start : start + count]

    beginnings = [cut(count) for count in size.shared]
    count = size.num_greedy + size.num_seeded
    long = dict(zip(draw.sample(range(count // 2), len(size.longest)), size.longest, strict=True))
    asks = []
    for number in range(count):
        prompt = draw.choice(beginnings) + cut(draw.randint(*size.usual))
        if number in long:
            prompt = beginnings[-1] + cut(long[number] - len(beginnings[-1]))
        max_tokens = size.max_tokens_after_long if number in long else draw.randint(*size.max_tokens)
        params = _params(number, max_tokens)
        asks.append(Ask(prompt, params, gap=draw.choice((0, 0, 1, 2, 5))))
    return asks


def _params(number: int, max_tokens: int) -> SamplingParams:
    kind, turn = (GREEDY, number // 2) if number % 2 else (SAMPLING, number // 2)
    settings: dict[str, Any] = {"temperature": 0.0, "logprobs": 0, **kind[turn % len(kind)]}
    return SamplingParams(seed=1000 + number, max_tokens=max_tokens, ignore_eos=True, **settings)


def prioritised(asks: Sequence[Ask], draw: random.Random) -> list[Ask]:
    """Of any priority, and spread over much of the run: who comes may take others' blocks."""
    most = sum(ask.length for ask in asks) // (12 * len(asks))
    return [replace(ask, priority=draw.randrange(8), gap=draw.randint(0, most)) for ask in asks]


def with_aborts(asks: Sequence[Ask], draw: random.Random) -> list[Ask]:
    """A third gives up, at any length, some of them before their first token."""
    return [
        replace(ask, abort_at=(draw.randint(0, 12), draw.randrange(ask.length - len(ask.prompt))))
        if number % 3 == 0
        else ask
        for number, ask in enumerate(asks)
    ]


@dataclass(frozen=True)
class Variation:
    """What differs in a run."""

    settings: dict[str, Any]
    change: Callable[[Sequence[Ask], random.Random], Sequence[Ask]] = lambda asks, draw: asks


VARIATIONS = {
    "blocks of 16": Variation({"block_size": 16}),
    "blocks of 32": Variation({"block_size": 32}),
    "no cache": Variation({"block_size": 16, "enable_prefix_caching": False}),
    "no step ahead": Variation({"block_size": 16, "async_scheduling": False}),
    "priorities": Variation({"block_size": 16, "scheduling_policy": "priority"}, prioritised),
    "aborts": Variation({"block_size": 16}, with_aborts),
}


@dataclass(frozen=True)
class Baseline:
    """Requests, and each one's answer alone."""

    asks: list[Ask]
    answers: list[Answer]


@pytest.fixture(scope="module")
def baseline(smollm2: Path) -> Baseline:
    settings = {"max_model_len": SIZE.max_model_len, "enable_prefix_caching": False, "num_threads": 2}
    with LLM("smollm2-135m", **settings) as llm:
        asks = requests(llm.tokenizer, SIZE)
        return Baseline(asks, drive_alone(llm, asks))


def run(asks: Sequence[Ask], block_size: int, **settings: Any) -> Run:
    """All requests on an engine whose blocks are just enough for the longest of them."""
    with LLM(
        "smollm2-135m",
        max_model_len=SIZE.max_model_len,
        num_blocks_override=-(-SIZE.max_model_len // block_size),
        max_num_batched_tokens=64,
        max_num_seqs=len(asks),
        num_threads=2,
        check_integrity=True,
        block_size=block_size,
        **settings,
    ) as llm:
        return drive(llm, asks)


def test_the_answers_are_worth_comparing(baseline: Baseline) -> None:
    answers = {tuple(answer.transcript.tokens) for answer in baseline.answers}
    assert len(answers) >= 0.9 * len(baseline.asks)
    lengths = [len(answer.transcript.logits) for answer in baseline.answers]
    assert lengths == [ask.params.max_tokens for ask in baseline.asks]
    assert max(len(ask.prompt) for ask in baseline.asks) == max(SIZE.longest)
    if FULL:
        assert len(baseline.asks) == 128


@pytest.mark.parametrize("name", VARIATIONS)
def test_too_few_blocks(baseline: Baseline, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    variation = VARIATIONS[name]
    asks = variation.change(baseline.asks, random.Random(7))
    found = run(asks, **variation.settings)
    problem = difference(found.answers, baseline.answers)
    assert problem is None, f"{name}: {problem}"

    pressure, num_aborted = found.pressure(), found.aborted_as.total()
    with capsys.disabled():
        counts = ", ".join(f"{count} {what}" for what, count in pressure.items())
        print(f"\n{name}: {len(asks)} requests, {num_aborted} aborted {dict(found.aborted_as)}; {counts}")
    assert pressure["num_preemptions"] >= SIZE.least_preemptions * (len(asks) - num_aborted)
    assert pressure["num_sat_out_steps"] > 0
    assert (pressure["num_resumed_with_hits"] > 0) == (name != "no cache")
    assert num_aborted == (-(-len(asks) // 3) if name == "aborts" else 0)
