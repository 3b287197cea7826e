"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from loadproof.engine.sampling_params import MAX_TOKENS
from loadproof.server.schemas.at_most import AtMost
from loadproof.server.schemas.base import (
    MAX_ENTRIES,
    AnswerModel,
    Object,
    PromptLogprobEntries,
    RequestModel,
    Text,
    Usage,
)
from loadproof.server.schemas.sampling import SamplingFields
from loadproof.server.schemas.shapes import LIST, OBJECT, TEXT, shaped, text_or_list, text_or_object


class TextPart(RequestModel):
    """A part of a message; only text is supported."""

    type: Text
    text: Text | None = None


Content = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[list[TextPart], AtMost(MAX_ENTRIES), Tag(LIST)],
    shaped(text_or_list, "text or a list of parts"),
]
TextOrObject = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[Object, Tag(OBJECT)], shaped(text_or_object, "text or an object")
]


def _function_if_null(given: object) -> object:
    return "function" if given is None else given


class FunctionCall(RequestModel):
    """A call that an assistant made earlier."""

    name: Text
    arguments: TextOrObject


class ToolCall(RequestModel):
    """A call that an assistant made earlier."""

    id: Text | None = None
    type: Annotated[Literal["function"], BeforeValidator(_function_if_null)] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], AtMost(MAX_ENTRIES)] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = Field(None, description="As in answers; templates aren't given it.")

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        message = self.model_dump(exclude={"refusal"}, exclude_none=True)
        if self.role == "developer":  # OpenAI's newer name, which templates don't know
            message["role"] = "system"
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1), AtMost(MAX_ENTRIES)]
_Unsupported = Annotated[list[Object], AtMost(MAX_ENTRIES)] | None


class ChatRequest(SamplingFields):
    """A chat to be answered."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="To the model's limit if absent.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="As `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="Needs `logprobs`.")
    add_generation_prompt: bool | None = Field(None, description="Begin an answer; true if absent.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message.")
    add_special_tokens: bool | None = Field(
        None, description="Begin with BOS beside what the template writes."
    )
    chat_template_kwargs: Object | None = Field(None, description="Variables of the template.")
    echo: bool | None = Field(None, description="Begin the answer with the message that it continues.")
    response_format: Object | None = Field(None, description="Only `{'type': 'text'}`.")
    tools: _Unsupported = Field(None, description="Not supported.")
    tool_choice: TextOrObject | None = Field(None, description="Only `none` and `auto`.")
    functions: _Unsupported = Field(None, description="Not supported.")


class TopLogprob(AnswerModel):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """One entry a token of the answer."""

    content: list[ChatTokenLogprob] | None


class AnswerMessage(AnswerModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(AnswerModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    seed: int = Field(description="A request with it and `n=1` gives this answer again.")
    token_ids: list[int] | None = None


class ChatAnswer(AnswerModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobEntries | None = None
    prompt_token_ids: list[int] | None = None
