"""What a step costs besides the model: planning, bookkeeping and text, in microseconds.

Usage: ``python bench/scheduling.py [--running N ...] [--cpu-time] [--json FILE] [--model NAME]``. The real
engine, in its default settings, drives a device that computes nothing. Each figure is the median of several
windows of steps. ``--cpu-time`` leaves out what other processes took, for a machine that isn't idle.

- ``schedule``: who computes what, admission and preemption included; ``prepare``: the step's arrays;
- ``device``: these copied in, and a result made of tokens; ``retire``: tokens and blocks brought up to date;
- ``text``: each token decoded, looked through for an end and handed to a listener; outputs put together.

``--model`` then times decoding steps of a real model, and what share of one the processor that plans is busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

from loadproof import LLM, SamplingParams
from loadproof.bench import Workload, random_prompts
from loadproof.devices.cpu import CpuDevice, CpuStep
from loadproof.devices.device import I32, DeviceLimits, StepBatch, StepResult
from loadproof.engine.engine import Engine
from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.engine.pipeline import Pipeline
from loadproof.engine.runner import Runner
from loadproof.engine.scheduler import Scheduler, SchedulerOptions
from loadproof.tokenizer.chat import ChatTemplates
from loadproof.tokenizer.pieces import byte_alphabet
from loadproof.tokenizer.tokenizer import SpecialTokens, Tokenizer

RUNNING = (1, 16, 64, 256, 1024)
WAITING = (0, 100_000)
WINDOWS, STEPS = 12, 16
VOCAB_SIZE = 4096
BLOCK_SIZE = 32
GOAL = 0.03  # of a step at 64 running


def words() -> Tokenizer:
    """The alphabet of bytes, then made-up words."""
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    vocab |= {f"Ġword{index}": index for index in range(len(vocab), VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens(eos_id=0, eos_token_ids=frozenset({0})), ChatTemplates({}))


@dataclass
class NullStep:
    tokens: I32

    def result(self) -> StepResult:
        return StepResult(self.tokens.copy(), [None] * len(self.tokens), None)


class NullDevice:
    """Takes a copy of a step's arrays, as any device must, and gives words drawn beforehand."""

    fingerprint = "null"

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits = limits
        self.vocab_size = VOCAB_SIZE
        self.num_sequences = 0
        self._tokens = np.random.default_rng(0).integers(256, VOCAB_SIZE, limits.max_num_seqs, np.int32)

    def submit(self, batch: StepBatch) -> NullStep:
        self.num_sequences += len(batch.seq_lens)
        for part in (batch, batch.sampling):
            for value in vars(part).values():
                if isinstance(value, np.ndarray):
                    value.copy()
        return NullStep(self._tokens[: len(batch.logits_rows)])

    def close(self) -> None:
        pass


class Stopwatch:
    """Adds up the seconds spent in methods, each of which a step calls once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: type, name: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> object:
            start = self.clock()
            try:
                return inner(*args, **options)
            finally:
                self.seconds[name] += self.clock() - start

        setattr(owner, name, timed)


def stopwatch(clock: Callable[[], float]) -> Stopwatch:
    watch = Stopwatch(clock)
    watch.watch(Engine, "step")
    watch.watch(Pipeline, "advance")
    watch.watch(Scheduler, "schedule")
    watch.watch(Runner, "prepare")
    for device, step in ((NullDevice, NullStep), (CpuDevice, CpuStep)):
        watch.watch(device, "submit")
        watch.watch(step, "result")
    return watch


@dataclass(frozen=True)
class Cost:
    """Microseconds a step, by part."""

    schedule: float
    prepare: float
    device: float
    retire: float
    text: float

    @property
    def total(self) -> float:
        return self.schedule + self.prepare + self.device + self.retire + self.text


def cost(seconds: Mapping[str, float], num_steps: int) -> Cost:
    us = {name: value / num_steps * 1e6 for name, value in seconds.items()}
    device = us["submit"] + us["result"]
    retire = us["advance"] - us["schedule"] - us["prepare"] - device
    return Cost(us["schedule"], us["prepare"], device, retire, us["step"] - us["advance"])


def median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(getattr(one, field.name) for one in costs) for field in fields(Cost)))


@dataclass(frozen=True)
class Load:
    """Requests of one kind: prompts of ``shared + own`` tokens, each completed to ``output`` tokens."""

    name: str
    shared: int
    own: int
    output: int
    blocks: float | None = None  # of the cache, for each that may run; None for as many as they need
    newest_first: bool = False  # and others give way
    every: int = 1  # steps after which new ones take the place of those that have finished

    @property
    def length(self) -> int:
        return self.shared + self.own + self.output

    def limits(self, running: int) -> DeviceLimits:
        per_request = -(-self.length // BLOCK_SIZE)
        num_blocks = running * per_request if self.blocks is None else int(running * self.blocks)
        budget = running * (self.shared + self.own)
        return DeviceLimits(budget, running, self.length, BLOCK_SIZE, max(num_blocks, per_request))


LOADS = (
    Load("all decode", 0, 64, 2048),
    Load("a quarter of the sequences is prompts", 0, 32, 4),
    Load("prefix hits and preemptions", 96, 32, 64, 1.5, newest_first=True, every=STEPS),
)


class Drive:
    """An engine on the null device, with a number of requests in it that stays the same."""

    def __init__(self, load: Load, running: int) -> None:
        self.load = load
        self.device = NullDevice(load.limits(running))
        policy = "priority" if load.newest_first else "fcfs"
        options = SchedulerOptions(policy, max_num_prefill_tokens=self.device.limits.max_num_batched_tokens)
        self.engine = Engine(self.device, words(), seed=0, scheduling=options)
        self.num_finished = 0
        self.num_deltas = 0
        self._num_added = self._num_steps = 0
        self._every = min(load.every, running)
        self._params = SamplingParams(max_tokens=load.output, ignore_eos=True)
        self._prompts = self._draw_prompts()

    def _draw_prompts(self) -> Iterator[list[int]]:
        draw = np.random.default_rng(0)
        shared = draw.integers(VOCAB_SIZE, size=self.load.shared).tolist()
        for index in count():
            # Other lengths, lest all fill their blocks in the same step.
            own = self.load.own - index % min(BLOCK_SIZE, self.load.own)
            yield shared + draw.integers(VOCAB_SIZE, size=own).tolist()

    def add(self, number: int) -> list[str]:
        return [self._add() for _ in range(number)]

    def _add(self) -> str:
        self._num_added += self.load.newest_first
        return self.engine.add_request(
            next(self._prompts),
            self._params,
            priority=-self._num_added,
            on_delta=self._on_delta,
            on_output=self._on_output,
        )

    def step(self) -> None:
        self.engine.step()
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            self.add(self.num_finished)
            self.num_finished = 0

    def warm_up(self, running: int, waiting: int) -> None:
        """Have requests begin one after another, and go on until they stand at all places."""
        num_steps = min(self.load.output, 2 * BLOCK_SIZE)
        for index in range(num_steps):
            self.add(running * (index + 1) // num_steps - running * index // num_steps)
            self.step()
        self.add(waiting)
        for _ in range(4 * num_steps):
            self.step()

    def _on_delta(self, delta: CompletionDelta) -> None:
        self.num_deltas += 1

    def _on_output(self, output: RequestOutput) -> None:
        self.num_finished += 1


@dataclass(frozen=True)
class Row:
    """One line of a table; ``sequences``, preemptions and hits are means a step."""

    load: str
    running: int
    waiting: int
    sequences: float
    cost: Cost
    preemptions: float
    hit_tokens: float


def measure(watch: Stopwatch, load: Load, running: int, waiting: int) -> Row:
    drive = Drive(load, running)
    drive.warm_up(running, waiting)
    before = drive.engine.stats()
    drive.device.num_sequences = 0
    costs = []
    for _ in range(WINDOWS):
        watch.seconds.clear()
        for _ in range(STEPS):
            drive.step()
        costs.append(cost(watch.seconds, STEPS))
    after = drive.engine.stats()

    def a_step(name: str) -> float:
        return (after[name] - before[name]) / (WINDOWS * STEPS)

    sequences = drive.device.num_sequences / (WINDOWS * STEPS)
    preemptions, hits = a_step("num_preemptions"), a_step("prefix_cache_hits")
    return Row(load.name, running, waiting, sequences, median(costs), preemptions, hits)


def print_table(rows: list[Row]) -> None:
    names = [field.name for field in fields(Cost)]
    header = ("running", "waiting", "sequences", *names, "total", "each", "preempted", "hit tokens")
    print(f"\nus a step: {rows[0].load}\n" + "".join(f"{name:>11}" for name in header))
    for row in rows:
        line = f"{row.running:>11}{row.waiting:>11}{row.sequences:>11.1f}"
        line += "".join(f"{getattr(row.cost, name):>11.1f}" for name in (*names, "total"))
        line += f"{row.cost.total / row.sequences:>11.2f}{row.preemptions:>11.2f}{row.hit_tokens:>11.0f}"
        print(line, flush=True)
    print_growth({(row.running, row.waiting): row.cost.total / row.sequences for row in rows})


def print_growth(each: dict[tuple[int, int], float]) -> None:
    """How far the cost of a sequence changes with how many run, and with how many wait."""
    few, many = (64, 0), (1024, 0)
    if few in each and many in each:
        print(f"a sequence at 1024 running costs {each[many] / each[few]:.2f} times as much as at 64")
    shares = [each[running, WAITING[1]] / each[running, 0] for running, waiting in each if waiting]
    print(f"{WAITING[1]} waiting: {min(shares):.2f} to {max(shares):.2f} times the cost without")


def measure_queue(number: int) -> dict[str, float]:
    """Microseconds to add and to abort one of so many requests, while others run."""
    drive = Drive(LOADS[0], 64)
    drive.warm_up(64, 0)
    start = time.perf_counter()
    names = drive.add(number)
    figures = {"add": time.perf_counter() - start}
    halves = {"abort, in order": names[::2], "abort, in any order": names[1::2]}
    random.Random(0).shuffle(halves["abort, in any order"])
    for what, half in halves.items():
        start = time.perf_counter()
        for name in half:
            drive.engine.abort_request(name)
        figures[what] = 2 * (time.perf_counter() - start)
    return {what: seconds / number * 1e6 for what, seconds in figures.items()}


def measure_model(watch: Stopwatch, name: str) -> dict[str, float]:
    """Milliseconds of a decoding step of 64 that ran with nothing else going on, and shares of it."""
    watch.clock = time.perf_counter  # another thread computes
    work = Workload("decode", 64, 256, WINDOWS * STEPS // 3)
    with LLM(name, max_num_seqs=64, max_model_len=512, async_scheduling=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
        for prompt in random_prompts(work, llm.engine.device.vocab_size, 0):
            llm.engine.add_request(prompt, params, on_delta=lambda delta: None)
        steps = list(decode_steps(watch, llm.engine, work.num_prompts))
    step, device, bookkeeping, text = (statistics.median(part) for part in zip(*steps, strict=True))
    return {
        "step_ms": step * 1e3,
        "device_share": device / step,
        "bookkeeping_share": bookkeeping / step,
        "text_share": text / step,
    }


def decode_steps(watch: Stopwatch, engine: Engine, num_running: int) -> Iterator[tuple[float, ...]]:
    """Seconds of each step that brings every request a token: whole, device, bookkeeping, text."""
    while engine.has_unfinished():
        before = engine.stats()["generation_tokens"]
        watch.seconds.clear()
        engine.step()
        if engine.stats()["generation_tokens"] - before == num_running:
            seconds = watch.seconds
            text = seconds["step"] - seconds["advance"]
            yield seconds["step"], seconds["result"], seconds["advance"] - seconds["result"], text


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs besides the model.")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N")
    parser.add_argument("--cpu-time", action="store_true", help="count the thread's own time only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--model", metavar="NAME", help="also time steps of this model")
    options = parser.parse_args()
    watch = stopwatch(time.thread_time if options.cpu_time else time.perf_counter)
    tables: list[object] = []
    for load in LOADS:
        rows = []
        for running in options.running:
            for waiting in WAITING:
                rows.append(measure(watch, load, running, waiting))
                gc.collect()  # what one leaves is not the next one's to clear away
        print_table(rows)
        tables += [asdict(row) for row in rows]
    queue = measure_queue(WAITING[1])
    print(
        f"\nus a request, of {WAITING[1]} that wait: " + "; ".join(f"{k} {v:.1f}" for k, v in queue.items())
    )
    report: dict[str, object] = {"unit": "us", "tables": tables, "queue": queue}
    if options.model:
        report["model"] = shares = measure_model(watch, options.model)
        print(f"\n{options.model}: a step of 64 takes {shares['step_ms']:.1f} ms, of which")
        print(
            ", ".join(
                f"{name.removesuffix('_share')} {value:.1%}"
                for name, value in shares.items()
                if name != "step_ms"
            )
        )
        print(f"scheduling and bookkeeping: the goal is {GOAL:.0%} at most")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
