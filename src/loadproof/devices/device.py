"""What the engine asks of a device: one step over any mix of rows of any sequences.

Steps run in the order of their submission, one at a time, so a step may be submitted while the one before it
runs, and take tokens from that one which nobody but the device knows yet.

Ownership: the caller owns every array in a :class:`StepBatch` again once :meth:`Device.submit` returns, and
owns the arrays in the result. The device owns the key-value cache; the engine owns the block numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


def no_rows() -> I32:
    """Indices of no row."""
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the R rows whose logits are computed, one entry a row.

    Lists of varying length are concatenated, with ``*_starts`` of R + 1 offsets into them.
    """

    temperature: F32  # [R]; 0 is greedy
    top_k: I32  # [R]; 0 keeps all
    top_p: F32  # [R]; 1 keeps all
    min_p: F32  # [R]; 0 keeps all
    repetition_penalty: F32  # [R]; 1 is off; over prompt and output tokens
    presence_penalty: F32  # [R]; 0 is off; over output tokens
    frequency_penalty: F32  # [R]; 0 is off; over output tokens
    seeds: U64  # [R]
    positions: I64  # [R]; absolute position of the token being sampled: the random numbers' counter
    history: I32  # [sum]; tokens of rows that use a penalty, prompt then output; the last is the row's own
    history_starts: I32  # [R + 1]
    num_prompt: I32  # [R]; how many of the row's history tokens are prompt
    bias_ids: I32  # [sum]; token ids with an additive bias (minus infinity bans a token)
    bias_values: F32  # [sum]
    bias_starts: I32  # [R + 1]
    num_logprobs: I32  # [R]; -1 none; k: the k best and the chosen token, of the raw logits


@dataclass(frozen=True)
class ScoreBatch:
    """N positions whose next token is known, and its log-probability wanted.

    ``hidden_rows`` says where the device keeps a position's final hidden state: at ``block * block_size +
    offset`` if ``DeviceLimits.keeps_hidden``, whichever step computed it; else at a row of this very step.
    """

    hidden_rows: I32  # [N]
    targets: I32  # [N]; the known token
    num_top: I32  # [N]; how many of the best tokens' log-probabilities besides


@dataclass(frozen=True)
class ScoreResult:
    """Log-probabilities of N scored positions under the raw logits."""

    logprobs: F32  # [N]; of the targets
    ranks: I32  # [N]; of the targets; 1 is the most likely
    top_ids: I32  # [sum of num_top]; each position's, most likely first, ties to the lowest id
    top_logprobs: F32  # [sum of num_top]


@dataclass(frozen=True)
class StepBatch:
    """Rows of one step: S sequences, T tokens in all, the tokens of a sequence consecutive and in order.

    A slot is a place where the device keeps the token that a step sampled, for the very next step: a row may
    carry it over instead of having its token from the host. Whatever ``token_ids`` and the last entry of
    ``history`` hold for such a row is not read. All other rows' tokens are the host's.
    """

    token_ids: I32  # [T]; within the vocabulary, also where it isn't read
    query_starts: I32  # [S + 1]; sequence s has rows query_starts[s]..query_starts[s + 1], at least one
    seq_lens: I32  # [S]; context length after this step: the last row's position plus one
    block_tables: I32  # [S, max_blocks]; entry j holds positions j * block_size...; unused entries are 0
    logits_rows: I32  # [R]; rows of T, ascending, whose next token is wanted
    sampling: SamplingBatch  # R entries
    return_logits: bool = False  # also return raw logits of the R rows (tests, tools)
    sample_slots: I32 = field(
        default_factory=no_rows
    )  # [R], distinct, or empty: the slot that each sampled token is kept in
    carried_rows: I32 = field(
        default_factory=no_rows
    )  # [C]; ascending rows of T whose token the preceding step samples
    carried_slots: I32 = field(default_factory=no_rows)  # [C]; the slots that it keeps them in
    scores: ScoreBatch | None = None  # with scores a step may have no rows


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of one row under the raw logits (before penalties, bias and temperature)."""

    token_logprob: float  # of the sampled token
    token_rank: int  # 1 is the most likely
    top_ids: I32  # [k]; most likely first, ties to the lowest id
    top_logprobs: F32  # [k]


@dataclass(frozen=True)
class StepResult:
    """What a step produced, in the order of ``logits_rows``."""

    token_ids: I32  # [R]; sampled
    logprobs: list[RowLogprobs | None]  # R entries
    logits: F32 | None  # [R, vocab_size] where asked for
    scores: ScoreResult | None = None  # where asked for


@dataclass(frozen=True)
class DeviceLimits:
    """Sizes fixed when a device is made."""

    max_num_batched_tokens: int  # largest T
    max_num_seqs: int  # largest S and R
    max_model_len: int  # largest seq_lens entry
    block_size: int  # tokens a block
    num_blocks: int  # blocks of the key-value cache, numbered from 0
    logprobs_mode: str = (
        "raw_logprobs"  # or raw_logits, processed_logprobs, processed_logits: see EngineConfig
    )
    keeps_hidden: bool = True  # blocks hold each position's final hidden state, too


class SubmittedStep(Protocol):
    """A step that is waiting for its turn, running or done."""

    def result(self) -> StepResult:
        """Wait for the step to end; to be called once. Raises what its run raised."""


class Device(Protocol):
    """An executor of one model's graph, with its weights, cache and scratch memory."""

    limits: DeviceLimits
    vocab_size: int
    fingerprint: str  # what outputs may depend on: weights, numeric format, kernel version, ISA level

    def submit(self, batch: StepBatch) -> SubmittedStep:
        """Queue one step and return at once.

        Raises ``ValueError`` on a malformed batch, of which nothing is kept: also where a row carries over
        a token that the step submitted before does not sample.
        """

    def close(self) -> None:
        """Release threads and memory; the device is unusable afterwards. Safe to call again."""
