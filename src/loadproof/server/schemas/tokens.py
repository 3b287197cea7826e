"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from pydantic import Field

from loadproof.server.schemas.base import AnswerModel, Object, RequestModel, Text, TokenIds
from loadproof.server.schemas.chat import Messages


class TokenizeRequest(RequestModel):
    """A text, or a chat, to be encoded."""

    model: str | None = Field(None, description="The served model's name.")
    prompt: Text | None = Field(None, description="A text; or else `messages`.")
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="True for a text, false for a chat if absent.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(AnswerModel):
    """The token ids."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to be decoded."""

    model: str | None = Field(None, description="The served model's name.")
    tokens: TokenIds


class DetokenizeAnswer(AnswerModel):
    """Their text, special tokens included."""

    prompt: str


class TokenizerInfo(AnswerModel):
    """What clients that count tokens by themselves ask for."""

    bos_token: str | None = Field(description="What begins a text, where the model has that.")
    eos_token: str | None = Field(description="What ends a text.")
