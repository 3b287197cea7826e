"""``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from loadproof.engine.sampling_params import MAX_TOKENS
from loadproof.server.schemas.at_most import AtMost
from loadproof.server.schemas.base import (
    MAX_ENTRIES,
    AnswerModel,
    Object,
    PromptLogprobEntries,
    Text,
    TokenIds,
    Usage,
)
from loadproof.server.schemas.sampling import SamplingFields
from loadproof.server.schemas.shapes import ID_LISTS, IDS, TEXT, TEXTS, prompt_shape, shaped

_NotEmpty = Field(min_length=1)
PromptIds = Annotated[TokenIds, _NotEmpty]
Prompt = Annotated[
    Annotated[Text, Tag(TEXT)]
    | Annotated[PromptIds, Tag(IDS)]
    | Annotated[list[Text], _NotEmpty, AtMost(MAX_ENTRIES), Tag(TEXTS)]
    | Annotated[list[PromptIds], _NotEmpty, AtMost(MAX_ENTRIES), Tag(ID_LISTS)],
    shaped(prompt_shape, "text, a list of texts, a list of token ids or a list of such lists"),
]


class CompletionRequest(SamplingFields):
    """Texts or token ids to be continued."""

    prompt: Prompt = Field(description="A text or several, or token ids or several lists of them.")
    max_tokens: int | None = Field(16, ge=0, le=MAX_TOKENS, description="0 only with `echo`.")
    echo: bool | None = Field(None, description="Begin each text with its prompt.")
    logprobs: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    best_of: int | None = Field(None, ge=1, description="Only as many as `n`.")
    suffix: Text | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Begin texts with the model's BOS token.")
    response_format: Object | None = Field(None, description="Only `{'type': 'text'}`.")


class CompletionLogprobs(AnswerModel):
    """Four lists of one length."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(AnswerModel):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    seed: int | None = Field(None, description="A request with it and `n=1` gives this completion again.")
    prompt_logprobs: PromptLogprobEntries | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionAnswer(AnswerModel):
    """The completions of all prompts, ``n`` of each, in order."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str
