"""What happens in a scenario: everything is drawn from its seed before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from tests.simulation.model import VOCAB_SIZE, Truth

from loadproof.devices.device import DeviceLimits
from loadproof.engine.pipeline import PipelineOptions
from loadproof.engine.prompt_scores import PromptScores
from loadproof.engine.request import Request
from loadproof.engine.sampling_params import SamplingParams
from loadproof.engine.scheduler import SchedulerOptions


@dataclass(frozen=True)
class Scenario:
    """Sizes, rules, and requests with the tick at which each arrives, in that order."""

    limits: DeviceLimits
    scheduling: SchedulerOptions
    pipeline: PipelineOptions
    arrivals: list[tuple[int, Truth]]
    eagerness: float  # how likely the device runs a step at each of the moments at which it may
    abort_rate: float  # of ticks
    reset_rate: float
    failure_rate: float


def draw_scenario(rng: Random) -> Scenario:
    """Any scenario; half of them have barely room for one longest request."""
    limits = _draw_limits(rng)
    scheduling = SchedulerOptions(
        policy=rng.choice(("fcfs", "priority")),
        enable_prefix_caching=rng.random() < 0.8,
        max_num_prefill_tokens=rng.choice((1, 2, 4, 8, 512)),
    )
    return Scenario(
        limits,
        scheduling,
        PipelineOptions(async_scheduling=rng.random() < 0.75, check_integrity=True),
        _Requests(rng, limits, scheduling.policy == "priority").draw(),
        eagerness=rng.choice((0.0, 0.2, 0.5, 1.0)),
        abort_rate=rng.choice((0.0, 0.0, 0.02, 0.1)),
        reset_rate=rng.choice((0.0, 0.0, 0.0, 0.02)),
        failure_rate=rng.choice((0.0, 0.0, 0.0, 0.01)),
    )


def _draw_limits(rng: Random) -> DeviceLimits:
    block_size = rng.choice((1, 2, 2, 3, 4, 4, 8))
    max_model_len = rng.randint(6, 40)
    least = -(-max_model_len // block_size)
    return DeviceLimits(
        max_num_batched_tokens=rng.choice((1, 3, 6, 8, 12, 16, 32)),
        max_num_seqs=rng.choice((1, 2, 4, 4, 6, 8, 8)),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=least + rng.choice((0, 0, 1, least // 2, least // 2, least, 3 * least)),
        keeps_hidden=rng.random() < 0.8,
    )


class _Requests:
    """Draws the requests of one scenario, many of which share prefixes."""

    def __init__(self, rng: Random, limits: DeviceLimits, ranked: bool) -> None:
        self._rng = rng
        self._length = limits.max_model_len
        self._stems = [self._tokens(self._length) for _ in range(rng.randint(1, 3))]
        self._salts = (None, None, "a", "b") if rng.random() < 0.3 else (None,)
        self._priorities = range(rng.choice((2, 5)) if ranked else 1)
        self._eos = frozenset(self._tokens(rng.choice((0, 0, 1, 2))))
        self._scores = rng.choice(
            (0.0, 0.0, 0.3, 0.9)
        )  # how many want the log-probabilities of their prompts
        self._gap = rng.choice((0.0, 1.0, 4.0, 8.0))  # ticks between arrivals, on average

    def draw(self) -> list[tuple[int, Truth]]:
        """Arrivals in order."""
        rng, tick, arrivals = self._rng, 0.0, []
        for index in range(rng.randint(3, 30)):
            tick += rng.expovariate(1 / self._gap) if self._gap else 0.0
            arrivals += [(int(tick), truth) for truth in self._group(str(index))]
        return arrivals

    def _group(self, request_id: str) -> list[Truth]:
        """A caller's request: one prompt, and mostly one completion."""
        rng = self._rng
        length = rng.randint(max(2, self._length // 3), self._length)
        # Short prompts that grow long are what makes a pool run out.
        prompt = self._prompt(rng.randint(1, min(length - 1, rng.choice((4, 8, length, length)))))
        max_tokens = length - len(prompt)
        params = self._params(max_tokens)
        priority, salt = rng.choice(self._priorities), rng.choice(self._salts)
        eos = self._eos if rng.random() < 0.8 else frozenset()
        seed = rng.getrandbits(32)
        cut = rng.randint(1, max_tokens) if rng.random() < 0.2 else None
        requests = [
            Request(request_id, index, prompt, params, seed + index, max_tokens, eos, priority, salt)
            for index in range(rng.randint(2, 4) if rng.random() < 0.1 else 1)
        ]
        if rng.random() < self._scores:
            requests[0].prompt_scores = PromptScores(prompt, rng.choice((0, 0, 1, 1, 3, 40)))
        return [Truth(request, cut) for request in requests]

    def _prompt(self, length: int) -> list[int]:
        """Some of a stem, and mostly something of its own after it."""
        shared = self._rng.choice((0, length // 2, length // 2, length))
        return self._rng.choice(self._stems)[:shared] + self._tokens(length - shared)

    def _params(self, max_tokens: int) -> SamplingParams:
        rng = self._rng
        return _params(
            temperature=rng.choice((0.0, 1.0)),
            stop=rng.randrange(VOCAB_SIZE) if rng.random() < 0.2 else None,
            min_tokens=min(max_tokens, rng.choice((0, 0, 0, 3))),
            penalty=rng.choice((0.0, 0.0, 0.0, 1.0)),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(count)]


@cache
def _params(temperature: float, stop: int | None, min_tokens: int, penalty: float) -> SamplingParams:
    # Cached: validation takes longer than a step.
    return SamplingParams(
        temperature=temperature,
        stop_token_ids=() if stop is None else (stop,),
        min_tokens=min_tokens,
        presence_penalty=penalty,
    )
