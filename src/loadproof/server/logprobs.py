"""Log-probabilities in the shapes of OpenAI's answers, and of vLLM's for prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from loadproof.engine.output import Logprob, PositionLogprobs
from loadproof.server.json_parts import Parts, list_of, run_of, slices
from loadproof.tokenizer.tokenizer import Tokenizer

# JSON has no infinities; vLLM writes this for a token that cannot come.
_IMPOSSIBLE = -9999.0
_LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")

Fragments = dict[str, Parts]
"""By name the runs of entries of each of a completion's four lists."""


def finite(value: float) -> float:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else math.copysign(_IMPOSSIBLE, value)


def chat_logprobs(
    positions: Sequence[PositionLogprobs], num_top: int, tokenizer: Tokenizer, as_ids: bool = False
) -> Parts:
    """``choices[].logprobs.content``, an entry a token; all tokens where ``num_top`` is -1.

    ``as_ids`` writes each token as vLLM does, as ``token_id:5``, so that no two are alike.
    """

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        return {
            "token": _name(token_id, one.decoded_token, as_ids),
            "logprob": finite(one.logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    def entries(some: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
        found = []
        for position in some:
            made = entry(*next(iter(position.items())))
            made["top_logprobs"] = [entry(*item) for item in _best(position, num_top)]
            found.append(made)
        return found

    return list_of([run_of(entries(some))] for some in slices(positions, _size(positions)))


class CompletionLogprobLists:
    """``choices[].logprobs`` of ``/v1/completions``: four lists, continued from piece to piece.

    A token's offset is the number of characters that are whole before it, so that tokens of one character
    have that character's. Offsets begin at ``offset`` and don't pass ``end``.
    """

    def __init__(
        self,
        num_top: int,
        tokenizer: Tokenizer,
        *,
        as_ids: bool = False,
        skip_special_tokens: bool = True,
        continuation: bool = True,
        offset: int = 0,
        end: int | None = None,
    ) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._decoder = tokenizer.incremental_decoder(
            skip_special_tokens=skip_special_tokens, continuation=continuation
        )
        self._offset = offset
        self._end = math.inf if end is None else end

    def fragments(
        self, positions: Sequence[PositionLogprobs | None], first: int = 0, first_is_text: bool = True
    ) -> Fragments:
        """The lists' next entries; a position of None is the prompt's first token, whose id is ``first``."""
        found: Fragments = {name: [] for name in _LISTS}

        for some in slices(positions, _size(positions)):
            lists = self._lists(some, first, first_is_text)
            for name, entries in zip(_LISTS, lists, strict=True):
                found[name].append(run_of(entries))
        return found

    def _lists(
        self, positions: Iterable[PositionLogprobs | None], first: int, first_is_text: bool
    ) -> list[list[Any]]:
        offsets: list[int] = []
        values: list[float | None] = []
        names: list[str] = []
        tops: list[dict[str, float] | None] = []
        for position in positions:
            if position is None:
                token_id, text = first, self._tokenizer.token_bytes(first).decode("utf-8", "replace")
                values.append(None)
                tops.append(None)
            else:
                token_id, chosen = next(iter(position.items()))
                text = chosen.decoded_token
                values.append(finite(chosen.logprob))
                tops.append(self._top(position))
            names.append(_name(token_id, text, self._as_ids))
            offsets.append(int(min(self._offset, self._end)))
            if position is not None or first_is_text:
                self._offset += len(self._decoder.push(token_id))
        return [offsets, values, names, tops]

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The best ones, and after them the chosen one: of two with one text the better is kept."""
        shown = dict(_best(position, self._num_top))
        chosen_id, chosen = next(iter(position.items()))
        shown.setdefault(chosen_id, chosen)
        found: dict[str, float] = {}
        for token_id, one in shown.items():
            found.setdefault(_name(token_id, one.decoded_token, self._as_ids), finite(one.logprob))
        return found


def completion_logprobs(*fragments: Fragments) -> dict[str, Parts]:
    """The members of ``choices[].logprobs``: each list's runs of entries, one after the other."""
    return {name: list_of([run] for each in fragments for run in each[name]) for name in _LISTS}


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> Parts:
    """``prompt_logprobs`` as vLLM answers: null for the first token, then an object by token id."""
    return list_of([run_of(_prompt_entries(some))] for some in slices(positions, _size(positions)))


def _prompt_entries(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
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


def _size(positions: Sequence[PositionLogprobs | None]) -> int:
    """How many entries a position has: the last one's, since a prompt's first has none."""
    return len(positions[-1] or ()) + 1 if positions else 1


def _best(position: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens in order. The chosen one is missing among the others where it is one of them."""
    (chosen, *rest) = position.items()
    place = next((at for at, (_, one) in enumerate(rest) if one.rank != at + 1), len(rest))
    rest.insert(place, chosen)
    return rest if num_top == -1 else rest[:num_top]


def _name(token_id: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text
