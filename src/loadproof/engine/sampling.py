"""Sampling parameters of the running requests as arrays by slot, ready to be gathered for a step."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from loadproof.devices.device import F32, I32, I64, SamplingBatch
from loadproof.engine.request import Request

SEED_MODULUS = 2**64


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
        bans = dict.fromkeys(request.eos_token_ids | request.stop_token_ids, -np.inf)
        self._biases[slot] = _bias(dict(params.logit_bias))
        self._biases_with_bans[slot] = _bias({**params.logit_bias, **bans})

    def gather(self, requests: list[Request], slots: I64, positions: I64, tokens: I32) -> SamplingBatch:
        """Parameters of R rows: ``slots`` and ``positions`` are ``[R]``, ``tokens`` ``[num_slots, len]``.

        ``positions`` are of the tokens being sampled; as many tokens of each slot are known, except that the
        last may still be the device's to fill in.
        """
        history, history_starts, num_prompt = _histories(requests, slots, positions, tokens)
        biases = [
            (self._biases_with_bans if bans_stops(request, position) else self._biases)[slot]
            for request, slot, position in zip(requests, slots.tolist(), positions.tolist(), strict=True)
        ]
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
            num_prompt=num_prompt,
            bias_ids=_joined([ids for ids, _ in biases], NO_BIAS[0]),
            bias_values=_joined([values for _, values in biases], NO_BIAS[1]),
            bias_starts=_starts([len(ids) for ids, _ in biases]),
            num_logprobs=self._num_logprobs[slots],
        )


def bans_stops(request: Request, position: int) -> bool:
    """Whether ``min_tokens`` forbids the token at ``position`` to end the request."""
    return position - request.num_prompt_tokens < request.params.min_tokens


Bias = tuple[I32, F32]
_Part = TypeVar("_Part", I32, F32)
NO_BIAS: Bias = (np.zeros(0, np.int32), np.zeros(0, np.float32))


def _bias(values: dict[int, float]) -> Bias:
    if not values:
        return NO_BIAS
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


def _histories(requests: list[Request], slots: I64, positions: I64, tokens: I32) -> tuple[I32, I32, I32]:
    """Known tokens of the rows that use a penalty, their starts, and how many of each are prompt."""
    penalised = [row for row, request in enumerate(requests) if request.params.uses_penalties]
    lengths = np.zeros(len(requests), np.int64)
    num_prompt = np.zeros(len(requests), np.int32)
    for row in penalised:
        lengths[row] = positions[row]
        num_prompt[row] = requests[row].num_prompt_tokens
    history = _joined([tokens[slots[row], : positions[row]] for row in penalised], NO_BIAS[0])
    return history, _starts(lengths), num_prompt


def _joined(parts: list[_Part], empty: _Part) -> _Part:
    """The parts one after another; most steps have none, and then nothing is copied."""
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if filled else empty


def _starts(lengths: list[int] | I64) -> I32:
    """Offsets ``[R + 1]`` of consecutive parts of these lengths."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
