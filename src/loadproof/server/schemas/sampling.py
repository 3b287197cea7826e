"""The fields that say how to choose tokens, the same for completions and chats."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, Tag

from loadproof.engine.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS,
)
from loadproof.server.errors import bad_request
from loadproof.server.schemas.at_most import AtMost
from loadproof.server.schemas.base import INT64_MIN, UINT64_MAX, Object, RequestModel, StreamOptions, Text
from loadproof.server.schemas.shapes import LIST, TEXT, shaped, text_or_list

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag(TEXT)] | Annotated[list[StopString], AtMost(MAX_STOPS), Tag(LIST)],
    shaped(text_or_list, "text or a list of texts"),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
LogitBias = Annotated[dict[BiasedToken, Bias], AtMost(MAX_LOGIT_BIAS)]

_INERT = "Without effect."

# Those that a request passes on as they are, where it sets them.
_PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)


class InertFields(RequestModel):
    """OpenAI's fields that are about its own service, or about tools: known, and without effect."""

    user: Text | None = Field(None, description=_INERT)
    metadata: Object | None = Field(None, description=_INERT)
    store: bool | None = Field(None, description=_INERT)
    service_tier: Text | None = Field(None, description=_INERT)
    safety_identifier: Text | None = Field(None, description=_INERT)
    prompt_cache_key: Text | None = Field(None, description=_INERT)
    parallel_tool_calls: bool | None = Field(None, description=_INERT)


class SamplingFields(InertFields):
    """How to choose tokens and where to end; what is absent or null is the model's own recommendation."""

    model: str | None = Field(None, description="The served model's name.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Completions; number i samples with `seed + i`.")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0 takes the best token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], AtMost(MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on past the model's end-of-sequence tokens.")
    seed: int | None = Field(
        None, ge=INT64_MIN, le=UINT64_MAX, description="Drawn and reported where it is absent."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-4, le=1e4)
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        None, ge=INT64_MIN, le=2**63 - 1, description="The least goes first; with that scheduling policy."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Only requests of one salt share cached prefixes."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens of log-probabilities as `token_id:5`, so that no two are alike."
    )
    timeout: float | None = Field(None, gt=0, le=1e6, description="Seconds until the request is given up.")

    def sampling_settings(self) -> dict[str, Any]:
        """Arguments of :class:`SamplingParams` that the request sets, but for those of each route's own."""
        given = {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
        return given

    def check_streaming(self) -> None:
        """Refuse what contradicts itself about streams."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream", "stream_options")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream holds the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
