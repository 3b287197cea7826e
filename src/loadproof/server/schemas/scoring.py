"""``/v1/score``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from loadproof.server.schemas.at_most import AtMost
from loadproof.server.schemas.base import MAX_ENTRIES, AnswerModel, RequestModel, Text, TokenIds, Usage
from loadproof.server.schemas.shapes import LIST, TEXT, shaped, text_or_list

ScoredText = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[TokenIds, Tag(LIST)],
    shaped(text_or_list, "text or a list of token ids"),
]


class ScoreRequest(RequestModel):
    """A context and continuations to be scored after it; each is text or token ids."""

    model: str | None = Field(None, description="The served model's name.")
    context: ScoredText = Field(description="Where empty, the model's BOS token stands for it.")
    continuations: Annotated[list[ScoredText], Field(min_length=1), AtMost(MAX_ENTRIES)]
    truncate_context: bool | None = Field(None, description="Cut a context that is too long from the left.")
    priority: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    timeout: float | None = Field(None, gt=0, le=1e6, description="Seconds until the request is given up.")


class Score(AnswerModel):
    """How likely one continuation is after the context."""

    index: int
    logprob: float = Field(description="Sum of `token_logprobs`.")
    is_greedy: bool = Field(description="Whether temperature 0 would have generated it.")
    num_tokens: int
    num_bytes: int
    num_dropped: int = Field(description="Tokens of the context that were cut off.")
    token_ids: list[int]
    token_logprobs: list[float]


class ScoreAnswer(AnswerModel):
    """The scores, in the order of the continuations."""

    id: str
    object: Literal["score"]
    created: int
    model: str
    scores: list[Score]
    usage: Usage
    system_fingerprint: str
