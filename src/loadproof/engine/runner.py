"""From a scheduler's chunks to the arrays of a device's step, and back to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loadproof.devices.device import I32, I64, Device, ScoreBatch, StepBatch
from loadproof.engine.request import Rank, Request
from loadproof.engine.sampling import SamplingTable
from loadproof.engine.step_plan import Chunk


class Runner:
    """Keeps the running requests' tokens, blocks and parameters in arrays by slot.

    A step's arrays are gathered from these, so a row costs a few Python operations however long its
    request is. Every step finds out for itself what a slot lacks: whose it is since when, and how many of
    its blocks are there. So no message about admission or preemption can be lost.
    """

    def __init__(self, device: Device) -> None:
        limits = device.limits
        self._limits = limits
        self._vocab_size = device.vocab_size
        # By rank and admission: the requests themselves would outlive their end here.
        self._owners: list[tuple[Rank, int] | None] = [None] * limits.max_num_seqs
        self._num_blocks = [0] * limits.max_num_seqs
        # Reserved address space; only pages that requests fill take memory.
        self._tokens = np.zeros((limits.max_num_seqs, limits.max_model_len), np.int32)
        width = -(-limits.max_model_len // limits.block_size)
        self._blocks = np.zeros((limits.max_num_seqs, width), np.int32)
        self._sampling = SamplingTable(limits.max_num_seqs)

    def prepare(self, chunks: list[Chunk], return_logits: bool = False) -> StepBatch:
        """The arrays of a step: a logits row for each chunk that samples, in their order.

        Every row's token comes from the host's known ones, except where its chunk says that it is carried.
        """
        assert chunks
        computing = [chunk for chunk in chunks if chunk.num_tokens]
        starts, counts, samples, carries = _columns(computing)
        slots = np.array([self._slot(chunk.request) for chunk in computing], np.int64)
        sampling, carried = samples.nonzero()[0], carries.nonzero()[0]
        query_starts = np.zeros(len(computing) + 1, np.int32)
        counts.cumsum(out=query_starts[1:])
        last_rows = query_starts[1:] - 1
        seq_lens = starts + counts
        positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1]).repeat(counts)
        width = -(-int(seq_lens.max(initial=0)) // self._limits.block_size)
        narrow = slots.astype(np.int32)
        return StepBatch(
            token_ids=self._tokens[slots.repeat(counts), positions],
            query_starts=query_starts,
            seq_lens=seq_lens.astype(np.int32),
            # Taking copies all that it takes from: no more than the slots in use, the lowest ones mostly.
            block_tables=self._blocks[: slots.max(initial=-1) + 1, :width].take(slots, axis=0),
            logits_rows=last_rows[sampling],
            sampling=self._sampling.gather(slots[sampling], seq_lens[sampling], self._tokens),
            return_logits=return_logits,
            sample_slots=narrow[sampling],
            carried_rows=last_rows[carried],
            carried_slots=narrow[carried],
            scores=self._scores(
                [chunk for chunk in chunks if chunk.scored is not None], computing, query_starts
            ),
        )

    def _scores(self, scoring: list[Chunk], computing: list[Chunk], query_starts: I32) -> ScoreBatch | None:
        """Positions to score, chunk by chunk, and where their hidden states are."""
        if not scoring:
            return None
        first_rows = dict(zip(map(id, computing), query_starts.tolist(), strict=False))
        rows, targets, tops = [], [], []
        for chunk in scoring:
            scores, positions = chunk.request.prompt_scores, chunk.scored
            assert scores is not None
            assert positions is not None
            if self._limits.keeps_hidden:
                size = self._limits.block_size
                blocks = self._blocks[self._slot(chunk.request)][positions // size]
                rows.append(blocks * size + positions % size)
            elif len(positions):
                rows.append(positions - chunk.start + first_rows[id(chunk)])
            targets.append(scores.targets[positions])
            tops.append(np.full(len(positions), scores.num_top))
        return ScoreBatch(_joined(rows), _joined(targets), _joined(tops))

    def record(self, chunks: list[Chunk], token_ids: I32) -> None:
        """Take in the tokens ``[R]`` that a step sampled for these chunks; their requests hold slots yet."""
        for chunk, token_id in zip(chunks, token_ids.tolist(), strict=True):
            slot = chunk.request.slot
            assert slot is not None
            # A request's limit ends it before its tokens outgrow their row.
            self._tokens[slot, chunk.stop] = token_id

    def _slot(self, request: Request) -> int:
        """The request's slot, with all that is known of it."""
        slot = request.slot
        assert slot is not None
        if self._owners[slot] != (request.rank, request.num_admissions):
            self._load(slot, request)
        have, now = self._num_blocks[slot], len(request.block_ids)
        if have < now:
            self._blocks[slot, have:now] = request.block_ids[have:]
            self._num_blocks[slot] = now
        return slot

    def _load(self, slot: int, request: Request) -> None:
        self._tokens[slot, : request.num_tokens] = request.tokens_between(0, request.num_tokens)
        self._blocks[slot] = 0
        self._num_blocks[slot] = 0
        self._sampling.load(slot, request, self._vocab_size)
        self._owners[slot] = (request.rank, request.num_admissions)


def _columns(chunks: list[Chunk]) -> tuple[I64, I64, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Starts, numbers of rows, and whether they sample and are carried, of chunks with rows."""
    if not chunks:
        none = np.zeros(0, np.int64)
        return none, none, none.astype(bool), none.astype(bool)
    _, starts, counts, samples, carries, _ = zip(*chunks, strict=True)
    return np.array(starts), np.array(counts), np.array(samples), np.array(carries)


def _joined(parts: list[npt.NDArray[Any]]) -> I32:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
