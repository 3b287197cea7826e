"""One sequence being completed: its tokens, its place in the cache and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from loadproof.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class RequestStatus(Enum):
    """Where a request stands: waiting, then running with a slot and blocks, then finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One completion of one prompt; a caller's request with ``n`` completions is ``n`` of these.

    The scheduler owns ``slot``, ``block_ids``, ``status`` and ``num_computed_tokens``: the tokens whose
    keys and values are in the cache, always fewer than ``num_tokens`` while the request runs.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # resolved: at least 1, and prompt plus output fit the model's limit
    eos_token_ids: frozenset[int]  # empty where they are ignored
    stop_token_ids: frozenset[int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.params.stop_token_ids)

    @property
    def key(self) -> tuple[str, int]:
        """What names the request among all in the engine."""
        return (self.request_id, self.index)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the caller gave."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_cached_tokens(self) -> int:
        """Most positions the cache will hold for it: the last token sampled is never fed back."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status is RequestStatus.FINISHED

    @property
    def bans_stops(self) -> bool:
        """Whether ``min_tokens`` still forbids the next token to end the request."""
        return len(self.output_token_ids) < self.params.min_tokens

    def token_finish(self) -> tuple[FinishReason, int | None] | None:
        """Whether the last token ends the request, and the stop id that did; None to go on."""
        token_id = self.output_token_ids[-1]
        if token_id in self.eos_token_ids:
            return "stop", None
        if token_id in self.stop_token_ids:
            return "stop", token_id
        if len(self.output_token_ids) >= self.max_tokens:
            return "length", None
        return None
