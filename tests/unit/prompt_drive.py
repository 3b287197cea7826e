"""An engine on the fake device that scores prompts, and what the model itself says about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from tests.fake_device import FakeDevice, byte_tokenizer, scored, small_limits

from loadproof import RequestOutput, SamplingParams
from loadproof.engine.engine import Engine
from loadproof.engine.output import PositionLogprobs
from loadproof.engine.pipeline import PipelineOptions
from loadproof.engine.scheduler import SchedulerOptions

TOKENIZER = byte_tokenizer()
PROMPT = [index * 7 % 250 for index in range(70)]  # four full blocks of 16 and six tokens
Entry = list[tuple[int, float, int]]
"""Token id, log-probability and rank, in the order of the dict."""


def other_prompt(seed: int, count: int = 70) -> list[int]:
    """A prompt that shares nothing with others."""
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(count)]


class Served:
    """An engine whose device counts rows and scores."""

    def __init__(
        self,
        *,
        caching: bool = True,
        policy: str = "fcfs",
        ahead: bool = True,
        prefill: int = 512,
        max_logprobs: int = -1,
        **limits: Any,
    ) -> None:
        self.device = FakeDevice(small_limits(**{"max_num_batched_tokens": 256, **limits}))
        self.engine = Engine(
            self.device,
            TOKENIZER,
            max_logprobs=max_logprobs,
            scheduling=SchedulerOptions(policy, caching, prefill),
            pipeline=PipelineOptions(ahead, check_integrity=True),
        )

    def ask(
        self, prompt: Sequence[int], k: int | None, *, placing: dict[str, Any] | None = None, **params: Any
    ) -> list[RequestOutput]:
        """Queue a request; its output appears in the list."""
        outputs: list[RequestOutput] = []
        settings = {"max_tokens": 1, "seed": 1, "ignore_eos": True, **params}
        self.engine.add_request(
            prompt,
            SamplingParams(prompt_logprobs=k, **settings),
            on_output=outputs.append,
            **(placing or {}),
        )
        return outputs

    def drain(self) -> tuple[int, int]:
        """Run all to their end; how many rows and how many scored positions that took."""
        before = self.device.num_rows, self.device.num_scored
        while self.engine.has_unfinished():
            self.engine.step()
        return self.device.num_rows - before[0], self.device.num_scored - before[1]

    def score(self, prompt: Sequence[int], k: int, **options: Any) -> tuple[int, int]:
        """Score a prompt, have the model confirm it, and return how many rows and scores that took."""
        outputs = self.ask(prompt, k, **options)
        cost = self.drain()
        confirm(outputs[0], k)
        return cost


def confirm(output: RequestOutput, k: int) -> None:
    """The output's prompt log-probabilities are what the model says, to the bit and in order."""
    found = output.prompt_logprobs
    if found is None:
        raise AssertionError("the prompt has no log-probabilities")
    # Raised by hand: it must fail with asserts compiled out, too.
    entries = (entry_of(one) for one in found)
    for at, (ours, models) in enumerate(zip_longest(entries, expected(output.prompt_token_ids, k))):
        if ours != models:
            raise AssertionError(f"position {at}: {ours}, the model says {models}")


def entry_of(position: PositionLogprobs | None) -> Entry | None:
    """What a dict holds, in its order."""
    if position is None:
        return None
    return [(token_id, one.logprob, one.rank) for token_id, one in position.items()]


def expected(prompt: Sequence[int], k: int) -> list[Entry | None]:
    """None, then for each token the model's log-probability of it, and of the ``k`` best after it."""
    entries: list[Entry | None] = [None]
    for at in range(1, len(prompt)):
        row = scored(list(prompt[:at]), prompt[at], k)
        best = zip(row.top_ids.tolist(), row.top_logprobs.tolist(), range(1, k + 1), strict=True)
        others = [one for one in best if one[0] != prompt[at]]
        entries.append([(prompt[at], row.token_logprob, row.token_rank), *others])
    return entries
