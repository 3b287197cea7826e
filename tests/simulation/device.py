"""The simulated device: keeps, for each position of its cache, the name of the prefix that ends there.

A row's name is made of the one before it as found through the block table, so that a stolen, stale or
misordered block changes every token and score that follows. It knows blocks, slots and rows, and nothing of
requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
from tests.simulation.model import ROOT, VOCAB_SIZE, draw, extend, history_noise, noise_of, scores_of

from loadproof.devices.device import DeviceLimits, SamplingBatch, ScoreResult, StepBatch, StepResult

Failure = Literal["submit", "run"]
BLANK = -1  # what a position holds that was never written


class InjectedFailureError(RuntimeError):
    """The failure that the scenario wanted."""


@dataclass(slots=True, eq=False)
class SimulatedStep:
    """A submitted step: its arrays copied into lists, and what came of it."""

    device: SimulatedDevice
    tokens: list[int]
    starts: list[int]
    lengths: list[int]
    tables: list[list[int]]
    logits_rows: list[int]
    slots: list[int]
    carried: list[tuple[int, int]]  # row and slot
    sampling: SamplingBatch
    scores: tuple[list[int], list[int], list[int]] | None  # places of hidden states, targets, numbers of best
    fails: bool
    done: bool = False
    sampled: list[int] | None = None
    scored: ScoreResult | None = None

    def result(self) -> StepResult:
        """See :class:`loadproof.devices.device.SubmittedStep`."""
        while not self.done:
            self.device.run_next()
        self.device.dawdle()
        if self.sampled is None:
            raise InjectedFailureError("the device failed")
        return StepResult(np.array(self.sampled, np.int32), [None] * len(self.sampled), None, self.scored)


class SimulatedDevice:
    """Runs steps in order, each at a random moment between its submission and its result.

    ``before_run`` sees each step once its rows have their tokens and before it writes anything. What
    follows a failed step is not shown: nothing of it counts.
    """

    fingerprint = "simulated"
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        limits: DeviceLimits,
        rng: Random,
        eagerness: float,
        before_run: Callable[[SimulatedStep], None],
    ) -> None:
        self.limits = limits
        self.failure: Failure | None = None  # what the next submitted step is to come to
        self._rng = rng
        self._eagerness = eagerness
        self._before_run = before_run
        self._failed = False
        self._waiting: deque[SimulatedStep] = deque()
        self._produced: set[int] = set()  # slots that the newest submitted step samples into
        self._last_tokens: dict[int, int] = {}
        self.cells = [BLANK] * (limits.num_blocks * limits.block_size)

    def submit(self, batch: StepBatch) -> SimulatedStep:
        """See :class:`loadproof.devices.device.Device`."""
        self.dawdle()
        if self.failure == "submit":
            self.failure = None
            raise InjectedFailureError("the device takes no step")
        slots = batch.sample_slots.tolist()
        carried = list(zip(batch.carried_rows.tolist(), batch.carried_slots.tolist(), strict=True))
        if not all(slot in self._produced for _, slot in carried):
            raise ValueError("a row carries over a token that the step before it does not sample")
        self._produced = set(slots)
        step = SimulatedStep(
            self,
            batch.token_ids.tolist(),
            batch.query_starts.tolist(),
            batch.seq_lens.tolist(),
            batch.block_tables.tolist(),
            batch.logits_rows.tolist(),
            slots,
            carried,
            batch.sampling,
            _score_columns(batch),
            self.failure == "run",
        )
        self.failure = None
        self._waiting.append(step)
        self.dawdle()
        return step

    def dawdle(self) -> None:
        """Run the oldest waiting step now, or not."""
        if self._waiting and self._rng.random() < self._eagerness:
            self.run_next()

    def run_next(self) -> None:
        """Run the oldest waiting step."""
        step = self._waiting.popleft()
        step.done = True
        self._failed = self._failed or step.fails
        if self._failed:
            return
        for row, slot in step.carried:
            step.tokens[row] = self._last_tokens[slot]
        self._before_run(step)
        names = self._write(step)
        step.sampled = self._sample(step, [names[row] for row in step.logits_rows])
        self._last_tokens = dict(zip(step.slots, step.sampled, strict=True))
        if step.scores is not None:
            places, targets, num_top = step.scores
            hidden = self.cells if self.limits.keeps_hidden else names
            step.scored = scores_of([hidden[place] for place in places], targets, num_top)

    def recover(self) -> None:
        """Work again after a failure; the cache holds nothing of use."""
        assert not self._waiting
        self._failed = False
        self._produced = set()
        self.cells = [BLANK] * len(self.cells)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, step: SimulatedStep) -> list[int]:
        """Name every row's prefix and keep it in its cell; all are read before any is written."""
        size, cells = self.limits.block_size, self.cells
        firsts = []
        for index, table in enumerate(step.tables):
            start = step.lengths[index] - step.starts[index + 1] + step.starts[index]
            last = start - 1
            firsts.append((start, cells[table[last // size] * size + last % size] if start else ROOT))
        names: list[int] = []
        for index, (position, name) in enumerate(firsts):
            table = step.tables[index]
            for token in step.tokens[step.starts[index] : step.starts[index + 1]]:
                name = extend(name, token)
                cells[table[position // size] * size + position % size] = name
                names.append(name)
                position += 1
        return names

    def _sample(self, step: SimulatedStep, names: list[int]) -> list[int]:
        sampling = step.sampling
        settings = zip(
            sampling.temperature.tolist(),
            sampling.seeds.tolist(),
            sampling.positions.tolist(),
            strict=True,
        )
        noise = [noise_of(*setting) for setting in settings]
        if len(sampling.history):
            self._add_history(step, noise)
        banned: list[list[int]] = [[]] * len(names)
        if len(sampling.bias_ids):
            starts, ids = sampling.bias_starts.tolist(), sampling.bias_ids.tolist()
            banned = [ids[starts[row] : starts[row + 1]] for row in range(len(names))]
        return [draw(*row) for row in zip(names, noise, banned, strict=True)]

    def _add_history(self, step: SimulatedStep, noise: list[int]) -> None:
        starts, history = step.sampling.history_starts.tolist(), step.sampling.history.tolist()
        num_prompt = step.sampling.num_prompt.tolist()
        for row, logits_row in enumerate(step.logits_rows):
            tokens = history[starts[row] : starts[row + 1]]
            if tokens:
                tokens[-1] = step.tokens[logits_row]
                noise[row] += history_noise(tokens, num_prompt[row])


def _score_columns(batch: StepBatch) -> tuple[list[int], list[int], list[int]] | None:
    scores = batch.scores
    if scores is None:
        return None
    return scores.hidden_rows.tolist(), scores.targets.tolist(), scores.num_top.tolist()
