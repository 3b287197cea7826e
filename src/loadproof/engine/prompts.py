"""What callers may give as prompts, brought to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from loadproof.tokenizer.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's token ids, and its text where it was given as one."""

    token_ids: Sequence[int]
    text: str | None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | TokenizedPrompt


class PromptError(ValueError):
    """Prompts of a form that is not supported."""


def tokenize_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    """One prompt or several, in order; texts are encoded together. Ids are not checked here."""
    parts = [_part(prompt) for prompt in _as_list(prompts)]
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(tokenizer.encode_batch(texts) if texts else ())
    return [TokenizedPrompt(next(encoded), part) if isinstance(part, str) else part for part in parts]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, (str, Mapping, TokenizedPrompt)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError(f"prompts are text, token ids or a list of those, not {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _part(prompt: Prompt) -> str | TokenizedPrompt:
    """A prompt's text, still to be encoded, or its tokens."""
    if isinstance(prompt, (str, TokenizedPrompt)):
        return prompt
    if isinstance(prompt, Mapping):
        return _member(prompt)
    return TokenizedPrompt(_ids(prompt), None)


def _member(prompt: Mapping[str, object]) -> str | TokenizedPrompt:
    if list(prompt) == ["prompt"] and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if list(prompt) == ["prompt_token_ids"]:
        return TokenizedPrompt(_ids(prompt["prompt_token_ids"]), None)
    raise PromptError(f"a prompt object holds prompt, a text, or prompt_token_ids; not {sorted(prompt)}")


def _ids(value: object) -> Sequence[int]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    raise PromptError(f"a prompt is text or a list of token ids, not {type(value).__name__}")
