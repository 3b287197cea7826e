"""From a scheduler's chunks to the arrays of a device's step, and back to tokens."""

from __future__ import annotations

import numpy as np

from loadproof.devices.device import I64, Device, StepBatch, StepResult
from loadproof.engine.request import Request
from loadproof.engine.sampling import SamplingTable
from loadproof.engine.scheduler import Chunk


class Runner:
    """Keeps the running requests' tokens, blocks and parameters in arrays by slot.

    A step's arrays are gathered from these, so a row costs a few Python operations however long its
    request is. A slot is loaded when a request is first seen in it, so no message about admission can be
    lost.
    """

    def __init__(self, device: Device) -> None:
        limits = device.limits
        self._device = device
        self._owners: list[Request | None] = [None] * limits.max_num_seqs
        # Reserved address space; only pages that requests fill take memory.
        self._tokens = np.zeros((limits.max_num_seqs, limits.max_model_len), np.int32)
        width = -(-limits.max_model_len // limits.block_size)
        self._blocks = np.zeros((limits.max_num_seqs, width), np.int32)
        self._sampling = SamplingTable(limits.max_num_seqs)

    def run(self, chunks: list[Chunk], return_logits: bool = False) -> StepResult:
        """Run one step; the result has a row for each chunk that samples, in their order."""
        assert chunks
        slots = self._slots(chunks)
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        batch = self._batch(chunks, slots, sampling, return_logits)
        result = self._device.execute(batch)
        assert len(result.token_ids) == len(result.logprobs) == len(sampling)
        # A request's limit ends it before its tokens outgrow their row.
        self._tokens[slots[sampling], batch.sampling.positions] = result.token_ids
        return result

    def _slots(self, chunks: list[Chunk]) -> I64:
        slots = []
        for chunk in chunks:
            slot = chunk.request.slot
            assert slot is not None
            if self._owners[slot] is not chunk.request:
                self._load(slot, chunk.request)
            slots.append(slot)
        return np.array(slots, np.int64)

    def _load(self, slot: int, request: Request) -> None:
        known = request.prompt_token_ids + request.output_token_ids
        self._tokens[slot, : len(known)] = known
        self._blocks[slot] = 0
        self._blocks[slot, : len(request.block_ids)] = request.block_ids
        self._sampling.load(slot, request, self._device.vocab_size)
        self._owners[slot] = request

    def _batch(self, chunks: list[Chunk], slots: I64, sampling: list[int], return_logits: bool) -> StepBatch:
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        computed = np.array([chunk.request.num_computed_tokens for chunk in chunks], np.int64)
        query_starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        seq_lens = computed + counts
        positions = np.arange(query_starts[-1]) + np.repeat(computed - query_starts[:-1], counts)
        width = -(-int(seq_lens.max()) // self._device.limits.block_size)
        requests = [chunks[index].request for index in sampling]
        return StepBatch(
            token_ids=self._tokens[np.repeat(slots, counts), positions],
            query_starts=query_starts,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=np.take(self._blocks[:, :width], slots, axis=0),
            logits_rows=query_starts[1:][sampling] - 1,
            sampling=self._sampling.gather(requests, slots[sampling], seq_lens[sampling], self._tokens),
            return_logits=return_logits,
        )
