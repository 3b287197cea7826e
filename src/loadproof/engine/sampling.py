"""Sampling parameters of the running requests as arrays by slot, ready to be gathered for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from loadproof.devices.device import F32, I32, I64, SamplingBatch
from loadproof.engine.request import Request

SEED_MODULUS = 2**64
ALWAYS = np.iinfo(np.int64).max


class SamplingTable:
    """One row of parameters a slot; a step's :class:`SamplingBatch` is gathered from the sampling slots."""

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.zeros(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._repetition_penalty = np.zeros(num_slots, np.float32)
        self._presence_penalty = np.zeros(num_slots, np.float32)
        self._frequency_penalty = np.zeros(num_slots, np.float32)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._num_logprobs = np.zeros(num_slots, np.int32)
        self._num_prompt = np.zeros(num_slots, np.int32)  # 0 where no penalty is used
        self._penalised = np.zeros(num_slots, np.bool_)
        # min_tokens bans what would end the request at positions before the first of these, and all biases
        # are empty from the second on.
        self._stoppable_from = np.zeros(num_slots, np.int64)
        self._unbiased_from = np.zeros(num_slots, np.int64)
        self._biases: list[Bias] = [NO_BIAS] * num_slots
        self._biases_with_bans: list[Bias] = [NO_BIAS] * num_slots

    def load(self, slot: int, request: Request, vocab_size: int) -> None:
        """Write a request's parameters into its slot."""
        params = request.params
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k, vocab_size)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._repetition_penalty[slot] = params.repetition_penalty
        self._presence_penalty[slot] = params.presence_penalty
        self._frequency_penalty[slot] = params.frequency_penalty
        self._seeds[slot] = request.seed % SEED_MODULUS
        wanted = -1 if params.logprobs is None else params.logprobs
        self._num_logprobs[slot] = vocab_size if params.logprobs == -1 else wanted
        self._penalised[slot] = params.uses_penalties
        self._num_prompt[slot] = request.num_prompt_tokens if params.uses_penalties else 0
        self._stoppable_from[slot] = stoppable = request.num_prompt_tokens + params.min_tokens
        self._unbiased_from[slot] = ALWAYS if params.logit_bias else stoppable
        bans = dict.fromkeys(request.eos_token_ids | request.stop_token_ids, -np.inf)
        self._biases[slot] = _bias(dict(params.logit_bias))
        self._biases_with_bans[slot] = _bias({**params.logit_bias, **bans})

    def gather(self, slots: I64, positions: I64, tokens: I32) -> SamplingBatch:
        """Parameters of R rows: ``slots`` and ``positions`` are ``[R]``, ``tokens`` ``[num_slots, len]``.

        ``positions`` are of the tokens being sampled; as many tokens of each slot are known, except that the
        last may still be the device's to fill in.
        """
        history, history_starts = self._histories(slots, positions, tokens)
        bias_ids, bias_values, bias_starts = self._gather_biases(slots, positions)
        return SamplingBatch(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            repetition_penalty=self._repetition_penalty[slots],
            presence_penalty=self._presence_penalty[slots],
            frequency_penalty=self._frequency_penalty[slots],
            seeds=self._seeds[slots],
            positions=positions,
            history=history,
            history_starts=history_starts,
            num_prompt=self._num_prompt[slots],
            bias_ids=bias_ids,
            bias_values=bias_values,
            bias_starts=bias_starts,
            num_logprobs=self._num_logprobs[slots],
        )

    def _histories(self, slots: I64, positions: I64, tokens: I32) -> tuple[I32, I32]:
        """Known tokens of the rows that use a penalty, and all rows' starts in them."""
        rows = self._penalised[slots].nonzero()[0]
        places = zip(slots[rows].tolist(), positions[rows].tolist(), strict=True)
        parts = [tokens[slot, :position] for slot, position in places]
        return _joined(parts, NO_BIAS[0]), _starts(len(slots), rows, parts)

    def _gather_biases(self, slots: I64, positions: I64) -> tuple[I32, F32, I32]:
        """Ids and values of the rows that have a bias, and all rows' starts in them."""
        rows = (positions < self._unbiased_from[slots]).nonzero()[0]
        found = [
            (self._biases_with_bans if position < self._stoppable_from[slot] else self._biases)[slot]
            for slot, position in zip(slots[rows].tolist(), positions[rows].tolist(), strict=True)
        ]
        ids = [ids for ids, _ in found]
        values = [values for _, values in found]
        return _joined(ids, NO_BIAS[0]), _joined(values, NO_BIAS[1]), _starts(len(slots), rows, ids)


Bias = tuple[I32, F32]
_Part = TypeVar("_Part", I32, F32)
NO_BIAS: Bias = (np.zeros(0, np.int32), np.zeros(0, np.float32))


def _bias(values: dict[int, float]) -> Bias:
    if not values:
        return NO_BIAS
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


def _joined(parts: list[_Part], empty: _Part) -> _Part:
    """The parts one after another; most steps have none, and then nothing is copied."""
    return np.concatenate(parts) if parts else empty


def _starts(num_rows: int, rows: I64, parts: Sequence[I32]) -> I32:
    """Offsets ``[num_rows + 1]`` of the parts that these rows have, one after another."""
    starts = np.zeros(num_rows + 1, np.int32)
    if parts:
        starts[rows + 1] = [len(part) for part in parts]
        starts.cumsum(out=starts)
    return starts
