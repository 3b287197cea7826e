"""Workloads of random tokens, and how fast an engine serves them."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from loadproof.engine.admission import RequestError
from loadproof.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from loadproof.engine.engine import Engine
    from loadproof.engine.output import CompletionDelta


@dataclass(frozen=True)
class Workload:
    """So many prompts of equal length, all there at once, each completed to a fixed length."""

    name: str
    num_prompts: int
    input_len: int
    output_len: int

    def check_fits(self, max_model_len: int) -> None:
        """Raise :class:`RequestError` for requests that would end before their length."""
        tokens = self.input_len + self.output_len
        if tokens > max_model_len:
            raise RequestError(
                f"workload {self.name} makes requests of {self.input_len} + {self.output_len} tokens, and "
                f"max_model_len is {max_model_len}"
            )


WORKLOADS = (
    Workload("single", 1, 32, 128),
    Workload("batch16", 16, 128, 128),
    Workload("batch64", 64, 256, 128),
    Workload("prefill", 8, 1024, 1),
)
# The range that comparisons with other engines use: plain tokens of any common vocabulary.
_FIRST_ID, _END_ID = 100, 40000


@dataclass(frozen=True)
class Measurement:
    """One run of a workload, or several as one: the medians of their times, in seconds.

    ``ttft`` is the median over prompts of the time to the first token, ``itl`` the median time between a
    prompt's tokens (None where there is one token only). Rates are tokens over ``elapsed``, the whole run.
    """

    prompt_tokens: int
    output_tokens: int
    elapsed: float
    ttft: float
    itl: float | None

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of prompts a second."""
        return self.prompt_tokens / self.elapsed

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.elapsed

    @property
    def total_tokens_per_s(self) -> float:
        """Tokens of either kind a second."""
        return (self.prompt_tokens + self.output_tokens) / self.elapsed

    def as_dict(self) -> dict[str, float | None]:
        """Counts, times and rates by name."""
        rates = ("prompt_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
        return asdict(self) | {name: getattr(self, name) for name in rates}


def random_prompts(workload: Workload, vocab_size: int, seed: int) -> list[list[int]]:
    """The workload's prompts: ``random.Random(seed)`` draws, taken modulo a smaller vocabulary."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    return [
        [draw.randrange(_FIRST_ID, _END_ID) % vocab_size for _ in range(workload.input_len)]
        for _ in range(workload.num_prompts)
    ]


def measure(engine: Engine, workload: Workload, seed: int) -> Measurement:
    """Run a workload once, greedily and without early stop, on an engine that serves nothing else.

    Raises :class:`RequestError` for one whose requests don't fit.
    """
    workload.check_fits(engine.device.limits.max_model_len)
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
    prompts = random_prompts(workload, engine.device.vocab_size, seed)
    times: dict[str, list[float]] = {}

    def note(delta: CompletionDelta) -> None:
        times.setdefault(delta.request_id, []).append(time.perf_counter())

    start = time.perf_counter()
    for prompt in prompts:
        engine.add_request(prompt, params, on_delta=note)
    while engine.has_unfinished():
        engine.step()
    return _summary(workload, time.perf_counter() - start, start, list(times.values()))


def measure_repeatedly(engine: Engine, workload: Workload, repeat: int, seed: int = 0) -> dict[str, Any]:
    """Median times over ``repeat`` runs, each with other prompts, as a JSON object with the workload's sizes.

    Rates follow from the median times, not from rates of runs, so that the two always agree. A run
    before them isn't counted: it touches memory for the first time, which nobody waits for later.
    """
    runs = [measure(engine, workload, seed + index) for index in range(repeat + 1)][1:]
    elapsed = [run.elapsed for run in runs]
    return {**asdict(workload), "repeat": repeat, **_median_of(runs).as_dict(), "elapsed_runs": elapsed}


def _median_of(runs: list[Measurement]) -> Measurement:
    """Runs of one workload as one; all have the same numbers of tokens."""
    gaps = [run.itl for run in runs if run.itl is not None]
    return replace(
        runs[0],
        elapsed=statistics.median(run.elapsed for run in runs),
        ttft=statistics.median(run.ttft for run in runs),
        itl=statistics.median(gaps) if gaps else None,
    )


def _summary(workload: Workload, elapsed: float, start: float, times: list[list[float]]) -> Measurement:
    output_tokens = sum(len(each) for each in times)
    assert output_tokens == workload.num_prompts * workload.output_len
    gaps = [after - before for each in times for before, after in itertools.pairwise(each)]
    return Measurement(
        prompt_tokens=workload.num_prompts * workload.input_len,
        output_tokens=output_tokens,
        elapsed=elapsed,
        ttft=statistics.median(each[0] - start for each in times),
        itl=statistics.median(gaps) if gaps else None,
    )
