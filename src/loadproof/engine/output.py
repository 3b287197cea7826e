"""What callers get back: whole outputs, and the pieces of a streamed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadproof.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability under the raw logits, and its rank there (1 is the best)."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the best ones in order."""


def position_logprobs(
    token_id: int, logprob: float, rank: int, best: Iterable[tuple[int, float]], text_of: Callable[[int], str]
) -> PositionLogprobs:
    """The entry of one position; ``best`` are ids and log-probabilities, most likely first."""
    position = {token_id: Logprob(logprob, rank, text_of(token_id))}
    for place, (best_id, value) in enumerate(best, 1):
        if best_id != token_id:
            position[best_id] = Logprob(value, place, text_of(best_id))
    return position


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one step added to one completion; the texts of a completion's deltas, joined, are its text."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    """With the first token of completion 0, where they were wanted."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``stop_reason`` is the stop string or stop token id that ended it, None for end-of-sequence and length.
    ``seed`` is the one it sampled with: a request with it and ``n=1`` gives this completion again.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and its ``n`` completions, in order of their index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    """Where they were wanted, and the request wasn't aborted before they were there: see
    :class:`~loadproof.engine.prompt_logprobs.PromptLogprobs`."""
