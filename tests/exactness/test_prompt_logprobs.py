"""Prompt log-probabilities of the real model: the same bits however they came about, and right.

Every prompt's are compared with those that it gets alone, from an engine without a cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.exactness.scoring import (
    Entry,
    Scored,
    engine,
    entry_of,
    first_parting,
    log_softmax,
    score,
    score_alone,
)
from tests.golden.text.make_perplexity import DIRECTORY

from loadproof import LLM, SamplingParams, _native
from loadproof.devices.device import F32
from loadproof.engine.prompt_logprobs import PromptLogprobs
from loadproof.engine.prompts import TokensPrompt

pytestmark = pytest.mark.real_model

MODEL = "smollm2-135m"
K = 20


@dataclass(frozen=True)
class Size:
    """How much a level scores; ``LOADPROOF_EXACTNESS=full`` (``make exactness``) gives every level more."""

    shared: int  # tokens of the beginning that prompts share
    own: tuple[int, ...]  # and each one's own
    text: int  # tokens that are compared with the oracle's
    generated: int
    answer: int = 36  # tokens of those that preempt each other


# By default the highest and the portable one; test_tiny_prompt_logprobs.py has all, on tiny models.
LEVELS = _native.available_levels()
SMALL, LARGE = Size(21, (1, 11, 27), 129, 8), Size(70, (1, 10, 11, 59, 130), 1025, 24, 96)
if os.environ.get("LOADPROOF_EXACTNESS") == "full":
    LONG = Size(300, (1, 20, 21, 150, 151, 300, 500, 724), 2401, 64, 200)
    SIZES, OTHER = {LEVELS[0]: LONG, "portable": SMALL}, LARGE
else:
    SIZES, OTHER = {LEVELS[0]: LARGE, "portable": Size(17, (2, 15), 33, 3)}, SMALL
    LEVELS = list(dict.fromkeys((LEVELS[0], LEVELS[-1])))


# How much farther off than rounding moves the oracle itself; which tokens are hit is a matter of chance.
TOKEN_ROOM, LARGEST_ROOM = 1.5, 2.0


@dataclass(frozen=True)
class Text:
    """Tokens of a text, and the oracle's surprise at each but the first: in float32, and rounded to bf16."""

    tokens: list[int]
    exact: npt.NDArray[np.float32]
    rounded: npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def text() -> Text:
    """The golden text."""
    with np.load(DIRECTORY / "nll.npz", allow_pickle=False) as stored:
        return Text(stored["tokens"].tolist(), stored["nll"], stored["rounded_nll"])


@dataclass(frozen=True)
class Baseline:
    """Prompts, and what each gets alone, at one level."""

    isa: str
    size: Size
    prompts: list[list[int]]
    answers: list[Scored]

    def check(self, found: list[Scored], variant: str, k: int = K) -> None:
        """These are the answers, for ``k`` best tokens."""
        problem = first_parting(found, [answer.best(k) for answer in self.answers])
        assert problem is None, f"{self.isa}, {variant}: {problem}"

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    @property
    def num_positions(self) -> int:
        return sum(len(prompt) - 1 for prompt in self.prompts)

    def engine(self, **settings: Any) -> Any:
        return engine(MODEL, self.isa, **{"max_model_len": 1100, **settings})


@pytest.fixture(scope="module", params=LEVELS)
def baseline(request: pytest.FixtureRequest, smollm2: Path, text: Text) -> Iterator[Baseline]:
    isa: str = request.param
    size = SIZES.get(isa, OTHER)
    tokens, at, prompts = text.tokens, size.shared, []
    for count in size.own:
        prompts.append(tokens[: size.shared] + tokens[at : at + count])
        at += count
    settings = {"enable_prefix_caching": False, "prompt_logprobs_cache": False, "max_model_len": 1100}
    with engine(MODEL, isa, **settings) as llm:
        yield Baseline(isa, size, prompts, score_alone(llm, prompts, K))


def test_the_answers_are_worth_comparing(baseline: Baseline) -> None:
    entries = [entry for answer in baseline.answers for entry in answer.entries]
    assert len(entries) == baseline.num_positions
    # Of a text that the model knows well enough, but not by heart.
    ranks = [entry[0][2] for entry in entries]
    assert 0.2 < np.mean([rank == 1 for rank in ranks]) < 0.9
    assert max(ranks) > K
    for entry in entries:
        assert len(entry) == K + (entry[0][2] > K)


def test_cold_warm_and_in_a_batch(baseline: Baseline) -> None:
    with baseline.engine() as llm:
        baseline.check(score(llm, baseline.prompts, K), "cold, in a batch")
        baseline.check(score(llm, baseline.prompts[::-1], K)[::-1], "warm, in a batch, reversed")
        baseline.check(score_alone(llm, baseline.prompts, K), "warm, alone")
        assert llm.stats()["prefix_cache_hits"] > 0
        llm.engine.reset_prefix_cache()
        baseline.check(score_alone(llm, baseline.prompts, K), "each after the ones before")


@pytest.mark.parametrize("order", [(1, 20), (20, 1, 0)], ids=str)
def test_k_asked_in_any_order(baseline: Baseline, order: tuple[int, ...]) -> None:
    with baseline.engine() as llm:
        for k in order:
            baseline.check(score(llm, baseline.prompts, k), f"{k} of {order}", k)


@pytest.mark.parametrize("cached", [True, False])
def test_budgets_of_16(baseline: Baseline, cached: bool) -> None:
    settings = {"max_num_batched_tokens": 16, "prompt_logprobs_cache": cached}
    with baseline.engine(**settings) as llm:
        baseline.check(score(llm, baseline.prompts, 1), "16 tokens a step, cold", 1)
        baseline.check(score(llm, baseline.prompts, K), "16 tokens a step, warm")
        assert llm.stats()["num_steps"] >= baseline.num_positions // 16


def test_after_some_blocks_were_evicted(baseline: Baseline) -> None:
    blocks = -(-(baseline.longest + 1) // 16)
    with baseline.engine(max_model_len=baseline.longest + 1, num_blocks_override=blocks) as llm:
        baseline.check(score_alone(llm, baseline.prompts, K), "cold")
        llm.generate([{"prompt_token_ids": list(range(100, 100 + baseline.longest // 2))}], use_tqdm=False)
        before = llm.stats()
        assert before["prefix_cache_evictions"] > 0
        baseline.check(score_alone(llm, baseline.prompts[::-1], K)[::-1], "some evicted")
        assert llm.stats()["prefix_cache_hits"] > before["prefix_cache_hits"]


def test_preempted_and_resumed(baseline: Baseline) -> None:
    """Long answers to the first prompts take the blocks of the later ones, which are being scored."""
    length = baseline.longest + baseline.size.answer
    blocks = -(-length // 16)
    settings = {"max_num_batched_tokens": 16, "max_num_prefill_tokens": 8, "num_blocks_override": blocks}
    with baseline.engine(max_model_len=length, **settings) as llm:
        found = score(llm, baseline.prompts, K, max_tokens=baseline.size.answer)
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_resumed_with_hits"] > 0
    baseline.check(found, "with preemptions")


def test_threads_and_blocks(baseline: Baseline) -> None:
    with baseline.engine(num_threads=3, block_size=64) as llm:
        baseline.check(score(llm, baseline.prompts, K), "3 threads, blocks of 64")


@dataclass(frozen=True)
class Sampled:
    """A prompt and what followed it: token ids, entries, and the logits that each was drawn from."""

    tokens: list[int]
    num_prompt: int
    entries: list[Entry]
    logits: list[F32]


def sample(llm: LLM, prompt: list[int], count: int) -> Sampled:
    rows: list[F32] = []
    llm.on_logits(lambda _name, _index, _position, row: rows.append(row.copy()))
    params = SamplingParams(seed=7, temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=5)
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    llm.on_logits(None)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    entries = [entry_of(one) for one in completion.logprobs]
    return Sampled([*prompt, *completion.token_ids], len(prompt), entries, rows)


def test_what_was_sampled_is_scored_the_same(baseline: Baseline) -> None:
    """Warm, where decode steps left the hidden states, and cold."""
    with baseline.engine() as llm:
        found = sample(llm, baseline.prompts[-1], baseline.size.generated)
        for variant in ("warm", "cold"):
            (whole,) = score(llm, [found.tokens], 5)
            assert whole.entries[found.num_prompt - 1 :] == found.entries, f"{baseline.isa}, {variant}"
            llm.engine.reset_prefix_cache()


def test_they_are_the_softmax_of_the_very_logits(baseline: Baseline) -> None:
    with baseline.engine() as llm:
        found = sample(llm, baseline.prompts[0], baseline.size.generated)
        (whole,) = score(llm, [found.tokens], K)
    for entry, logits in zip(whole.entries[found.num_prompt - 1 :], found.logits, strict=True):
        exact = log_softmax(logits)
        order = np.lexsort((np.arange(logits.size), -logits))
        best = {int(token): place for place, token in enumerate(order[:K], 1)}
        own = entry[0][0]
        assert entry[0][2] == 1 + np.count_nonzero(logits > logits[own])
        others = [token for token in best if token != own]
        assert [(token, rank) for token, _, rank in entry[1:]] == [(token, best[token]) for token in others]
        for token, logprob, _ in entry:
            assert abs(logprob - exact[token]) < 1e-5


def test_they_differ_from_the_oracles_as_bf16_rounding_does(
    baseline: Baseline, text: Text, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding products' inputs to bf16 moves the oracle's own values; ours may be a little farther off."""
    tokens = text.tokens[: baseline.size.text]
    exact = text.exact[: len(tokens) - 1].astype(np.float64)
    rounding = text.rounded[: len(tokens) - 1] - exact
    with baseline.engine(max_model_len=4096) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
    assert isinstance(output.prompt_logprobs, PromptLogprobs)
    errors = -output.prompt_logprobs.token_logprobs.astype(np.float64) - exact
    with capsys.disabled():
        for name, these in ((baseline.isa, errors), ("the oracle rounded to bf16", rounding)):
            print(
                f"\n{name}: {len(these)} tokens; surprise differs from the oracle's by {these.mean():+.5f} "
                f"on average, {np.abs(these).mean():.4f} a token, {np.abs(these).max():.3f} at most",
                end="",
            )
    assert 0 < np.abs(rounding).mean() < 0.05  # else the bounds below would let anything through
    # Each a sum of many roundings; the plan also rounds probabilities.
    assert abs(errors.mean()) < 0.005
    assert np.abs(errors).mean() < TOKEN_ROOM * np.abs(rounding).mean()
    assert np.abs(errors).max() < LARGEST_ROOM * np.abs(rounding).max()
