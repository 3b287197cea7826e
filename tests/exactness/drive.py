"""Drives a device directly: any mix of rows of sequences whose tokens are known beforehand.

A decode is then a chunk of one row: the device is told no more than that in a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadproof.devices.cpu import CpuDevice
from loadproof.devices.device import (
    F32,
    I32,
    Device,
    DeviceLimits,
    SamplingBatch,
    StepBatch,
    StepResult,
    SubmittedStep,
)
from loadproof.graph import Graph
from loadproof.weights.tensors import TensorSource

Chunks = Sequence[tuple[int, int]]  # (sequence, rows) in the order they stand in a step


@dataclass(frozen=True)
class Rows:
    """Rows ``[start, stop)`` of one sequence, and where its keys and values lie."""

    tokens: Sequence[int]
    start: int
    stop: int
    blocks: Sequence[int]


def greedy(num_rows: int) -> SamplingBatch:
    """Parameters of rows that take the best token and want nothing else."""
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    none = np.zeros(0, np.int32)
    starts = np.zeros(num_rows + 1, np.int32)
    return SamplingBatch(
        temperature=zeros,
        top_k=np.zeros(num_rows, np.int32),
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seeds=np.zeros(num_rows, np.uint64),
        positions=np.zeros(num_rows, np.int64),
        history=none,
        history_starts=starts,
        num_prompt=np.zeros(num_rows, np.int32),
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        bias_starts=starts,
        num_logprobs=np.full(num_rows, -1, np.int32),
    )


def batch_of(parts: Sequence[Rows], logits_rows: I32 | None = None) -> StepBatch:
    """One step over ``parts`` in their order, with the logits of every row unless told otherwise."""
    tokens = [token for part in parts for token in part.tokens[part.start : part.stop]]
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int32)
    for table, part in zip(tables, parts, strict=True):
        table[: len(part.blocks)] = part.blocks
    rows = np.arange(len(tokens), dtype=np.int32) if logits_rows is None else logits_rows
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        query_starts=np.cumsum([0, *(part.stop - part.start for part in parts)], dtype=np.int32),
        seq_lens=np.array([part.stop for part in parts], np.int32),
        block_tables=tables,
        logits_rows=rows,
        sampling=greedy(len(rows)),
        return_logits=True,
    )


def run(
    device: Device,
    sequences: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    steps: Sequence[Chunks],
) -> list[F32]:
    """Logits ``[len(sequence), vocab_size]`` of every position, each computed in its turn by ``steps``."""
    logits = [np.full((len(tokens), device.vocab_size), np.nan, np.float32) for tokens in sequences]
    done = [0] * len(sequences)
    for chunks in steps:
        parts = [Rows(sequences[i], done[i], done[i] + count, tables[i]) for i, count in chunks]
        found = device.submit(batch_of(parts)).result().logits
        assert found is not None
        at = 0
        for (i, count), part in zip(chunks, parts, strict=True):
            logits[i][part.start : part.stop] = found[at : at + count]
            done[i] = part.stop
            at += count
    assert done == [len(tokens) for tokens in sequences], "the steps leave positions out"
    return logits


def alone(device: Device, tokens: Sequence[int]) -> F32:
    """Logits of every position of one sequence, in one step, in blocks from 0 on."""
    blocks = range(-(-len(tokens) // device.limits.block_size))
    return run(device, [tokens], [blocks], [[(0, len(tokens))]])[0]


def make_device(
    graph: Graph,
    source: TensorSource,
    isa: str,
    *,
    num_threads: int = 1,
    block_size: int = 16,
    max_rows: int = 256,
    num_tokens: int = 1024,
) -> CpuDevice:
    """A device with a cache of ``num_tokens`` that gives the logits of every row of a step."""
    limits = DeviceLimits(max_rows, max_rows, num_tokens, block_size, -(-num_tokens // block_size))
    return CpuDevice(graph, source, limits, num_threads=num_threads, isa=isa)


def first_difference(found: F32, expected: F32) -> str | None:
    """Where two arrays of logits differ in any bit, in words; NaN equals NaN whatever its payload."""
    assert found.shape == expected.shape
    bits = [np.where(np.isnan(a), np.float32(np.nan), a).view(np.uint32) for a in (found, expected)]
    places = np.argwhere(bits[0] != bits[1])
    if not len(places):
        return None
    position, token = places[0].tolist()
    values = f"{found[position, token]!r}, not {expected[position, token]!r}"
    rows = len(np.unique(places[:, 0]))
    return f"position {position}, token {token}: {values} ({rows} of {len(found)} positions differ)"


@dataclass(frozen=True)
class LeakyStep:
    """A step of a leaky device."""

    step: SubmittedStep
    leaks: bool

    def result(self) -> StepResult:
        found = self.step.result()
        if self.leaks and found.logits is not None and len(found.logits):
            found.logits[-1, 7] = np.nextafter(found.logits[-1, 7], np.float32(np.inf))
        return found


class LeakyDevice:
    """A device as others are: one logit is the next float up where a step holds more than one sequence."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.limits = device.limits
        self.vocab_size = device.vocab_size
        self.fingerprint = device.fingerprint

    def submit(self, batch: StepBatch) -> LeakyStep:
        return LeakyStep(self._device.submit(batch), leaks=len(batch.seq_lens) > 1)

    def close(self) -> None:
        self._device.close()
