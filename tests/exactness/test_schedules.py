"""Logits at a position depend on the tokens up to it alone, bit for bit, whatever else a step holds.

Every test compares with the same sequence alone: in one step, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exactness.drive import Chunks, LeakyDevice, alone, first_difference, make_device, run
from tests.exactness.poison import PoisonedSource
from tests.tiny_models import TINY

from loadproof import _native
from loadproof.devices.cpu import CpuDevice
from loadproof.devices.device import Device

SETUPS = ((1, 32), (2, 16), (3, 64), (4, 16))  # threads and block size
NUM_TOKENS = 1280  # of a cache
MAX_ROWS = 640  # of a step: from 128 rows a thread on, rows are divided among threads instead of columns

# Where panels, chunks and tiles end: at 16, 32 and 64 keys or rows.
EDGES = sorted({edge + by for edge in (16, 32, 48, 64, 96, 128, 256) for by in (-1, 0, 1)})
# Splits of keys end at 512 and 1024.
LONG = 1060


@dataclass(frozen=True)
class Subject:
    """One model at one level: a device that only ever sees one sequence, and others for any schedule."""

    source: PoisonedSource
    alone: CpuDevice
    devices: Sequence[CpuDevice]

    def difference(
        self,
        device: Device,
        sequences: Sequence[list[int]],
        tables: Sequence[list[int]],
        steps: Sequence[Chunks],
    ) -> str | None:
        """The first difference from each sequence alone, as far as it is clean, in words."""
        for i, logits in enumerate(run(device, sequences, tables, steps)):
            tokens = sequences[i][: self.source.num_clean(sequences[i])]
            if not tokens:
                continue
            expected = alone(self.alone, tokens)
            clean = slice(self.source.clean)
            problem = first_difference(logits[: len(tokens), clean], expected[:, clean])
            if problem is not None:
                return f"sequence {i} of {len(sequences)}: {problem}"
        return None

    def soil(self, device: Device) -> None:
        """Leave the largest values there are in every slot of every block."""
        limits = device.limits
        spoilt = [self.source.nan, self.source.inf] * (NUM_TOKENS // 2)
        run(device, [spoilt], [list(range(limits.num_blocks))], [[(0, MAX_ROWS)]] * (NUM_TOKENS // MAX_ROWS))


@pytest.fixture(
    scope="module", params=[f"{name}-{isa}" for isa in _native.available_levels() for name in TINY]
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    name, _, isa = request.param.rpartition("-")
    source = PoisonedSource(TINY[name])

    def device(threads: int, block_size: int, max_rows: int) -> CpuDevice:
        return make_device(
            source.graph,
            source,
            isa,
            num_threads=threads,
            block_size=block_size,
            max_rows=max_rows,
            num_tokens=NUM_TOKENS,
        )

    single = device(1, 32, NUM_TOKENS)
    others = [device(threads, block_size, MAX_ROWS) for threads, block_size in SETUPS]
    yield Subject(source, single, others)
    for each in (single, *others):
        each.close()


@dataclass(frozen=True)
class Schedule:
    """Sequences by length and first spoilt position, the order of everything, and where it all lies."""

    lengths: list[int]
    spoilt: list[int | None]
    steps: list[Chunks]
    setup: int
    soiled: bool
    seed: int

    def sequences(self, source: PoisonedSource) -> list[list[int]]:
        made = [source.sequence(length, self.seed + i) for i, length in enumerate(self.lengths)]
        for tokens, at in zip(made, self.spoilt, strict=True):
            if at is not None and at < len(tokens):
                tokens[at] = source.nan + self.seed % 2
        return made

    def tables(self, device: Device) -> list[list[int]]:
        return scattered(self.lengths, device, self.seed)


def scattered(lengths: Sequence[int], device: Device, seed: int) -> list[list[int]]:
    """Blocks for each sequence, as many as it needs, in no order."""
    blocks = iter(np.random.default_rng(seed).permutation(device.limits.num_blocks).tolist())
    return [[next(blocks) for _ in range(-(-length // device.limits.block_size))] for length in lengths]


@st.composite
def steps_of(draw: Callable[..., int], lengths: list[int]) -> list[Chunks]:
    """Any chunks of any sequences in any order; after some steps, whatever is left in large ones."""
    left = list(lengths)
    steps: list[Chunks] = []
    while any(left):
        chunks: list[tuple[int, int]] = []
        budget = MAX_ROWS
        order: Sequence[int] = draw(st.permutations(range(len(lengths))))  # type: ignore[assignment]
        for i in order:
            most = min(left[i], budget)
            some = st.just(most) | st.integers(0, min(most, 2)) | st.integers(0, most)
            count = draw(some) if len(steps) < 10 else most
            if count:
                chunks.append((i, count))
                left[i] -= count
                budget -= count
        steps.append(chunks or [next((i, 1) for i, rows in enumerate(left) if rows)])
        if not chunks:
            left[steps[-1][0][0]] -= 1
    return steps


LENGTHS = st.lists(st.integers(1, 40) | st.sampled_from(EDGES), min_size=1, max_size=4)
SCHEDULES = LENGTHS.flatmap(
    lambda lengths: st.builds(
        Schedule,
        lengths=st.just(lengths),
        spoilt=st.lists(st.none() | st.integers(0, 60), min_size=len(lengths), max_size=len(lengths)),
        steps=steps_of(lengths),
        setup=st.integers(0, len(SETUPS) - 1),
        soiled=st.booleans(),
        seed=st.integers(0, 2**31),
    )
)


@settings(max_examples=8)
@given(schedule=SCHEDULES)
def test_a_schedule_changes_no_bit(subject: Subject, schedule: Schedule) -> None:
    device = subject.devices[schedule.setup]
    if schedule.soiled:
        subject.soil(device)
    sequences, tables = schedule.sequences(subject.source), schedule.tables(device)
    assert subject.difference(device, sequences, tables, schedule.steps) is None


@pytest.mark.parametrize(
    "setup", range(len(SETUPS)), ids=lambda setup: "threads-{}-blocks-{}".format(*SETUPS[setup])
)
def test_a_long_context_in_chunks_and_single_rows(subject: Subject, setup: int) -> None:
    """Chunks that end on and beside every edge of a split, single rows across them, in a soiled cache."""
    device, tokens = subject.devices[setup], subject.source.sequence(LONG, setup)
    subject.soil(device)
    counts = [508, *[1] * 6, 508, *[1] * 4, LONG - 508 - 6 - 508 - 4]
    steps = [[(0, count)] for count in counts]
    tables = scattered([LONG], device, setup)
    assert subject.difference(device, [tokens], tables, steps) is None


def test_many_rows_and_few_rows_are_the_same(subject: Subject) -> None:
    """One step has enough rows for threads to divide them; its neighbour then decodes beside the rest."""
    lengths = [530, 190]
    sequences = [subject.source.sequence(length, length) for length in lengths]
    for device in subject.devices:
        steps: list[Chunks] = [[(0, 510), (1, 129)], *[[(1, 1), (0, 1)]] * 4, [(0, 16), (1, 57)]]
        tables = scattered(lengths, device, len(lengths))
        assert subject.difference(device, sequences, tables, steps) is None


def test_an_overflow_harms_nobody(subject: Subject) -> None:
    """A spoilt sequence shares every step with a clean one; then a clean one takes over its blocks."""
    source, lengths = subject.source, [45, 45]
    for device in subject.devices[:2]:
        tables = scattered(lengths, device, 1)
        sequences = [[source.nan, source.inf, *[source.nan] * 20, *[source.inf] * 23], source.sequence(45, 3)]
        steps: list[Chunks] = [[(0, 20), (1, 38)], *[[(0, 1), (1, 1)]] * 7, [(0, 18)]]
        assert subject.difference(device, sequences, tables, steps) is None
        heir = source.sequence(45, 4)
        assert subject.difference(device, [heir], tables[:1], [[(0, 41)], *[[(0, 1)]] * 4]) is None


def test_a_fresh_device_and_a_used_one_agree(subject: Subject) -> None:
    tokens = subject.source.sequence(100, 5)
    fresh = make_device(subject.source.graph, subject.source, subject.alone.isa)
    try:
        used = subject.devices[1]
        subject.soil(used)
        assert first_difference(alone(used, tokens), alone(fresh, tokens)) is None
    finally:
        fresh.close()


def test_a_leak_of_one_bit_is_found(subject: Subject) -> None:
    leaky = LeakyDevice(subject.devices[0])
    sequences = [subject.source.sequence(9, 1), subject.source.sequence(5, 2)]
    tables = scattered([9, 5], leaky, 0)
    apart: list[Chunks] = [[(0, 9)], [(1, 5)]]
    assert subject.difference(leaky, sequences, tables, apart) is None
    together: list[Chunks] = [[(0, 9), (1, 4)], [(1, 1)]]
    problem = subject.difference(leaky, sequences, tables, together)
    assert problem is not None
    assert problem.startswith("sequence 1 of 2: position 3, token 7:")
