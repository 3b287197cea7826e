"""Log-probabilities in the shapes of OpenAI's answers, and of vLLM's for prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from loadproof.engine.output import Logprob, PositionLogprobs
from loadproof.tokenizer.tokenizer import Tokenizer

# JSON has no infinities; vLLM writes this for a token that cannot come.
_IMPOSSIBLE = -9999.0


def finite(value: float) -> float:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else math.copysign(_IMPOSSIBLE, value)


def chat_logprobs(
    positions: Iterable[PositionLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content``, one a token; all tokens where ``num_top`` is -1."""
    content = []
    for position in positions:
        (token_id, chosen), *_ = position.items()
        entry = _chat_entry(token_id, chosen, tokenizer)
        entry["top_logprobs"] = [_chat_entry(*item, tokenizer) for item in _best(position, num_top)]
        content.append(entry)
    return content


class CompletionLogprobLists:
    """``choices[].logprobs`` of ``/v1/completions``: four lists, continued from piece to piece."""

    def __init__(self, num_top: int, offset: int = 0) -> None:
        self._num_top = num_top
        self._offset = offset

    def lists(self, positions: Iterable[PositionLogprobs | None], first: str | None = None) -> dict[str, Any]:
        """The lists of these positions; a position of None is a prompt's first token, ``first``."""
        found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            if position is None:
                text, value, top = first or "", None, None
            else:
                chosen = next(iter(position.values()))
                text, value = chosen.decoded_token, finite(chosen.logprob)
                top = {one.decoded_token: finite(one.logprob) for _, one in self._shown(position)}
            found["text_offset"].append(self._offset)
            found["token_logprobs"].append(value)
            found["tokens"].append(text)
            found["top_logprobs"].append(top)
            self._offset += len(text)
        return found

    def _shown(self, position: PositionLogprobs) -> Iterator[tuple[int, Logprob]]:
        """The best ones, and after them the chosen one: of two with one text the better is kept."""
        shown = dict(_best(position, self._num_top))
        chosen_id, chosen = next(iter(position.items()))
        shown.setdefault(chosen_id, chosen)
        texts: set[str] = set()
        for token_id, one in shown.items():
            if one.decoded_token not in texts:
                texts.add(one.decoded_token)
                yield token_id, one


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` as vLLM answers: null for the first token, then an object by token id."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in position.items()
        }
        for position in positions
    ]


def _best(position: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens in order. The chosen one is missing among the others where it is one of them."""
    (chosen, *rest) = position.items()
    place = next((at for at, (_, one) in enumerate(rest) if one.rank != at + 1), len(rest))
    rest.insert(place, chosen)
    return rest if num_top == -1 else rest[:num_top]


def _chat_entry(token_id: int, one: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": one.decoded_token,
        "logprob": finite(one.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
