"""One sequence being completed: its tokens, its place in the cache and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from loadproof.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from loadproof.engine.prefix_keys import PrefixKeys
    from loadproof.engine.prompt_scores import PromptScores

# An error: the step that was telling of the request failed, or was interrupted.
FinishReason = Literal["stop", "length", "abort", "error"]
CUT_OFF: frozenset[FinishReason | None] = frozenset({"abort", "error"})


Rank = tuple[int, int]
"""Priority, where the policy looks at that, then arrival; the least goes first. No two requests share one."""


class RequestStatus(Enum):
    """Where a request stands.

    Waiting ones hold nothing, running ones a slot and blocks. One that gives way is leaving until no
    submitted step can touch its blocks, and then waits again. Finished ones hold theirs as long.
    """

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One completion of one prompt; a caller's request with ``n`` completions is ``n`` of these.

    The scheduler owns all that follows ``cache_salt``. A submitted step counts at once in
    ``num_computed_tokens`` and ``num_pending_tokens``; its results come later. So, while the request runs,
    ``num_ready_tokens <= num_computed_tokens <= num_tokens + num_pending_tokens``.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # resolved: at least 1, and prompt plus output fit the model's limit
    eos_token_ids: frozenset[int]  # empty where they are ignored
    priority: int = 0
    cache_salt: str | None = None
    prompt_scores: PromptScores | None = None  # where log-probabilities of the prompt are wanted
    stop_token_ids: frozenset[int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    rank: Rank = (0, 0)
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    block_ids: list[int] = field(default_factory=list)
    prefix: PrefixKeys | None = None  # where prefixes are cached, from the first attempt to admit it
    num_computed_tokens: int = 0  # positions that are in the cache once every submitted step has run
    num_ready_tokens: int = 0  # positions that are in the cache for certain
    num_pending_tokens: int = 0  # sampled by submitted steps, their values not known here yet
    num_steps_in_flight: int = 0  # submitted steps with rows of it whose results have not come
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the cache when it first ran
    num_admissions: int = 0
    num_preemptions: int = 0
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
    def num_missing_tokens(self) -> int:
        """Positions to compute until its next token can be sampled; 0 once its last one is under way."""
        if len(self.output_token_ids) + self.num_pending_tokens >= self.max_tokens:
            return 0
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Most positions the cache will hold for it: the last token sampled is never fed back."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status is RequestStatus.FINISHED

    def let_go(self) -> None:
        """Hold no place any more: what was computed is nobody's now."""
        self.slot = None
        self.block_ids = []
        self.num_computed_tokens = self.num_ready_tokens = self.num_published_blocks = 0

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Known tokens at the positions ``start <= position < stop``, which copies no others."""
        assert 0 <= start <= stop <= self.num_tokens
        num_prompt = len(self.prompt_token_ids)
        prompt = self.prompt_token_ids[start:stop]
        return prompt + self.output_token_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]

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
