"""What callers may give as prompts, brought to one form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from loadproof.engine.admission import ClosedError, RequestError

if TYPE_CHECKING:
    from loadproof.tokenizer.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's token ids, and its text where it was given as one.

    Only prompts of one ``cache_salt`` share what the cache holds of them.
    """

    token_ids: Sequence[int]
    text: str | None
    cache_salt: str | None = None


class _Text(NamedTuple):
    """A prompt that is still to be encoded."""

    text: str
    cache_salt: str | None = None


Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | TextPrompt | TokensPrompt | TokenizedPrompt
_NO_IDS = (str, bytes, bytearray, memoryview)  # sequences that are no token ids


class PromptError(RequestError):
    """Prompts of a form that is not supported."""


@contextmanager
def naming(index: int, count: int) -> Iterator[None]:
    """Have an error about prompt ``index`` of ``count`` say which one it was, where there are several."""
    try:
        yield
    except ClosedError:
        raise
    except ValueError as error:
        if isinstance(error, RequestError):
            error.prompt_index = index
        if count > 1:
            error.args = (f"prompt {index + 1} of {count}: {error}",)
        raise


def tokenize_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    """One prompt or several, in order; texts are encoded together. Ids are not checked here."""
    listed = _as_list(prompts)
    parts = []
    for index, prompt in enumerate(listed):
        with naming(index, len(listed)):
            parts.append(_part(prompt))
    return _tokenized(parts, tokenizer)


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer) -> TokenizedPrompt:
    """One prompt, and never several. Ids are not checked here."""
    return _tokenized([_part(prompt)], tokenizer)[0]


def _tokenized(parts: Sequence[_Text | TokenizedPrompt], tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    encoded = iter(_encode(parts, tokenizer))
    return [
        TokenizedPrompt(next(encoded), part.text, part.cache_salt) if isinstance(part, _Text) else part
        for part in parts
    ]


def _encode(parts: Sequence[_Text | TokenizedPrompt], tokenizer: Tokenizer) -> list[list[int]]:
    texts = [part.text for part in parts if isinstance(part, _Text)]
    try:
        return tokenizer.encode_batch(texts) if texts else []
    except ValueError:
        for index, part in enumerate(parts):  # which one was it?
            with naming(index, len(parts)):
                if isinstance(part, _Text):
                    tokenizer.encode(part.text)
        raise


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, (str, Mapping, TokenizedPrompt)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _NO_IDS):
        raise PromptError(f"prompts are text, token ids or a list of those, not {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _part(prompt: Prompt) -> _Text | TokenizedPrompt:
    """A prompt's text, still to be encoded, or its tokens."""
    if isinstance(prompt, str):
        return _Text(prompt)
    if isinstance(prompt, TokenizedPrompt):
        return prompt
    if isinstance(prompt, Mapping):
        return _member(prompt)
    return TokenizedPrompt(_ids(prompt), None)


def _member(prompt: Mapping[str, object]) -> _Text | TokenizedPrompt:
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise PromptError(f"a prompt object's cache_salt is text, not {type(salt).__name__}")
    keys = [key for key in prompt if key != "cache_salt"]
    if keys == ["prompt_token_ids"]:
        return TokenizedPrompt(_ids(prompt["prompt_token_ids"]), None, salt)
    if keys != ["prompt"]:
        raise PromptError(f"a prompt object holds either prompt or prompt_token_ids, not {keys!r:.200}")
    text = prompt["prompt"]
    if not isinstance(text, str):
        raise PromptError(f"a prompt object's prompt is text, not {type(text).__name__}")
    return _Text(text, salt)


def _ids(value: object) -> Sequence[int]:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            form = f"{value.dtype} of shape {value.shape}"
            raise PromptError(f"an array of token ids is integers in one dimension, not {form}")
        ids: list[int] = value.tolist()
        return ids
    if isinstance(value, Sequence) and not isinstance(value, _NO_IDS):
        return value
    raise PromptError(f"a prompt is text or a list of token ids, not {type(value).__name__}")
