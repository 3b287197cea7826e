"""What all requests have in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from loadproof.engine.sampling_params import MAX_TOKENS
from loadproof.server.schemas.at_most import AtMost

Text = Annotated[str, Field(min_length=0)]
"""Text that is Unicode: pydantic looks for lone surrogates where there are bounds to check."""
INT64_MIN, UINT64_MAX = -(2**63), 2**64 - 1
MAX_IDS = 1 << 20
"""Most token ids in one list: no model that could be served here takes more."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], AtMost(MAX_IDS)]
MAX_ENTRIES = 4096
"""Most entries of an object, and of a list that isn't of token ids."""
Object = Annotated[dict[str, Any], AtMost(MAX_ENTRIES)]
_MOST_UNKNOWN = 100


class RequestModel(BaseModel):
    """A body whose values must have just the types that it says; fields it doesn't know are kept apart."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_serializer(mode="wrap")
    def _without_unknown(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What an answer's header calls ignored goes nowhere, at any depth."""
        return {name: value for name, value in dump(self).items() if name in type(self).model_fields}

    def unknown_fields(self) -> list[str]:
        """Names of fields that were given and mean nothing here, those of parts as ``messages[0].name``.

        One that is null counts as absent: OpenAI's client writes such into messages that it gives back.
        No more are named than can be told: a body has room for a hundred thousand.
        """
        return list(islice(self._unknown(), _MOST_UNKNOWN))

    def _unknown(self) -> Iterator[str]:
        given = (name for name, value in (self.model_extra or {}).items() if value is not None)
        yield from sorted(islice(given, _MOST_UNKNOWN))
        for name in type(self).model_fields:
            yield from _unknown_in(getattr(self, name), name)


class AnswerModel(BaseModel):
    """A body of an answer."""

    model_config = ConfigDict(protected_namespaces=())


def _unknown_in(value: object, path: str) -> Iterator[str]:
    if isinstance(value, RequestModel):
        yield from (f"{path}.{name}" for name in value._unknown())
    elif isinstance(value, list):
        for index, part in enumerate(value):
            if not isinstance(part, RequestModel | list):
                return  # lists hold things of one kind
            yield from _unknown_in(part, f"{path}[{index}]")


class StreamOptions(RequestModel):
    """What a stream says besides its pieces."""

    include_usage: bool | None = Field(
        None, description="End with a chunk that holds the usage and no choices."
    )
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far in every chunk.")


class PromptTokensDetails(AnswerModel):
    """Where a prompt's tokens came from."""

    cached_tokens: int = Field(description="Prompt tokens found in the cache of prefixes.")


class Usage(AnswerModel):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TokenLogprob(AnswerModel):
    """One token of a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobEntries = list[dict[str, TokenLogprob] | None]
"""One entry a prompt token: null for the first, then an object by token id."""

Extra = dict[str, Any]
