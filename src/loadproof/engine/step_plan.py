"""A step while it is being planned, and the chunks that it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from loadproof.devices.device import I64
from loadproof.engine.prompt_scores import PromptScores
from loadproof.engine.request import Request

MOST_TOP_A_SCORE = 2048
"""Best tokens that a scored position counts as one row of the budget."""


class Chunk(NamedTuple):
    """``num_tokens`` rows of a request in a step, from position ``start`` on, and positions that it scores.

    ``samples`` says that they reach its last token, so that the next one is sampled. ``carried`` says
    that the last row's own token is being sampled by the step before: the host doesn't know it yet.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    carried: bool
    scored: I64 | None = None  # ascending positions of the prompt, each computed before or in this chunk

    @property
    def stop(self) -> int:
        """The position after the last row's."""
        return self.start + self.num_tokens


@dataclass
class StepPlan:
    """A step while it is being planned."""

    num_tokens_left: int
    num_prefill_left: int
    num_scores_left: int
    num_wanted: int | None = None  # blocks that running requests soon want, from the first time it matters
    num_kept: int = 0  # free blocks that a waiting request will start with when the others it needs have come
    chunks: list[Chunk] = field(default_factory=list)
    has_room: bool = True  # until a waiting request found none

    @property
    def admits(self) -> bool:
        """Whether another waiting request may be looked at."""
        return self.has_room and self.num_prefill_left > 0

    def score(self, request: Request, scores: PromptScores, count: int, budget: int) -> I64 | None:
        """Take positions to score with ``count`` more rows, as many as there is room for; None for none."""
        missing = scores.missing(min(request.num_computed_tokens + count, len(scores.targets)))
        # A step's lists of best tokens are bounded like its rows.
        cost = min(-(-scores.num_top // MOST_TOP_A_SCORE) or 1, budget)
        planned = missing[: self.num_scores_left // cost]
        if not len(planned):
            return None
        self.num_scores_left -= len(planned) * cost
        scores.submit(planned)
        return planned
