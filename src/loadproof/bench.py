"""Workloads of random tokens, and how fast an engine serves them."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
    """One run of a workload, or the medians of several. Times in seconds.

    ``ttft`` is the median over prompts of the time to the first token, ``itl`` the median time between a
    prompt's tokens (None where there is one token only). Rates are over the whole run.
    """

    elapsed: float
    ttft: float
    itl: float | None
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def random_prompts(workload: Workload, vocab_size: int, seed: int) -> list[list[int]]:
    """The workload's prompts: ``random.Random(seed)`` draws, taken modulo a smaller vocabulary."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    return [
        [draw.randrange(_FIRST_ID, _END_ID) % vocab_size for _ in range(workload.input_len)]
        for _ in range(workload.num_prompts)
    ]


def measure(engine: Engine, workload: Workload, seed: int) -> Measurement:
    """Run a workload once, greedily and without early stop, on an engine that serves nothing else."""
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
    """Medians over ``repeat`` runs, each with other prompts, as a JSON object with the workload's sizes.

    A run before them isn't counted: it touches memory for the first time, which nobody waits for later.
    """
    runs = [measure(engine, workload, seed + index) for index in range(repeat + 1)][1:]
    medians = {name: _median([getattr(run, name) for run in runs]) for name in asdict(runs[0])}
    elapsed = [run.elapsed for run in runs]
    return {**asdict(workload), "repeat": repeat, **medians, "elapsed_runs": elapsed}


def _summary(workload: Workload, elapsed: float, start: float, times: list[list[float]]) -> Measurement:
    num_prompt = workload.num_prompts * workload.input_len
    num_output = sum(len(each) for each in times)
    gaps = [after - before for each in times for before, after in itertools.pairwise(each)]
    return Measurement(
        elapsed=elapsed,
        ttft=statistics.median(each[0] - start for each in times),
        itl=statistics.median(gaps) if gaps else None,
        prompt_tokens_per_s=num_prompt / elapsed,
        output_tokens_per_s=num_output / elapsed,
        total_tokens_per_s=(num_prompt + num_output) / elapsed,
    )


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
