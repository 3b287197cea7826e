"""Choices of ``/v1/completions`` as JSON: what belongs to a prompt is encoded once for all its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from loadproof.engine.output import CompletionDelta, PositionLogprobs
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.server.json_parts import Parts, with_members
from loadproof.server.logprobs import CompletionLogprobLists, Fragments, completion_logprobs, prompt_logprobs
from loadproof.server.schemas.completions import CompletionRequest
from loadproof.tokenizer.tokenizer import Tokenizer


class PromptPart:
    """What each of a prompt's choices holds of it; slow to make where there are :attr:`scores`."""

    def __init__(self, body: CompletionRequest, prompt: TokenizedPrompt, tokenizer: Tokenizer) -> None:
        self.body = body
        self.tokenizer = tokenizer
        self._prompt = prompt
        self.scores: Sequence[PositionLogprobs | None] | None = None
        self.has_scores = body.prompt_logprobs is not None or bool(body.echo and body.logprobs is not None)
        self._held: list[CompletionDelta] = []

    @cached_property
    def echo(self) -> str:
        """What a choice's text begins with."""
        if not self.body.echo:
            return ""
        if self._prompt.text is not None:
            return self._prompt.text
        return self.tokenizer.decode(list(self._prompt.token_ids), skip_special_tokens=False)

    @cached_property
    def members(self) -> dict[str, Parts]:
        """Members of a choice that are the prompt's."""
        found: dict[str, Parts] = {}
        if self.body.return_token_ids:
            found["prompt_token_ids"] = [to_json(list(self._prompt.token_ids))]
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(self.scores or ())
        return found

    @cached_property
    def fragments(self) -> Fragments:
        """How the lists of log-probabilities begin."""
        first = self._prompt.token_ids[0]
        lists = CompletionLogprobLists(
            self.body.logprobs or 0,
            self.tokenizer,
            as_ids=bool(self.body.return_tokens_as_token_ids),
            skip_special_tokens=False,
            continuation=False,
            end=len(self.echo),
        )
        return lists.fragments((self.scores or ()) if self.body.echo else (), first, self._echoes(first))

    def complete(self, deltas: Sequence[CompletionDelta]) -> list[CompletionDelta]:
        """The pieces that can be written: all of them, once the prompt's scores are there if it has any."""
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self.scores = delta.prompt_logprobs
        self._held += deltas
        if self.has_scores and self.scores is None:
            return []
        ready, self._held = self._held, []
        return ready

    def _echoes(self, first: int) -> bool:
        """Whether the first token's text is in the echo: BOS that was added to a text is not."""
        if self._prompt.text is None or not self.tokenizer.is_special(first):
            return True
        return self._prompt.text.encode().startswith(self.tokenizer.token_bytes(first))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is written of a choice at a time: the whole of it, or what a step added."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs]
    finish_reason: str | None
    stop_reason: int | str | None
    seed: int


class ChoiceWriter:
    """Writes one choice, whole or in pieces; the first piece holds what belongs to its prompt."""

    def __init__(self, prompt: PromptPart, index: int) -> None:
        self._prompt = prompt
        self._index = index
        self._lists: CompletionLogprobLists | None = None
        self.begun = False

    def write(self, piece: Piece) -> Parts:
        """The choice of an answer or of a chunk."""
        body, first = self._prompt.body, not self.begun
        self.begun = True
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._prompt.echo + piece.text if first else piece.text,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        members: dict[str, Parts] = {}
        if first:
            choice["seed"] = piece.seed
            members |= self._prompt.members
        if body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if body.logprobs is None:
            choice["logprobs"] = None
        else:
            members["logprobs"] = self._logprobs(piece, first)
        return with_members(choice, members)

    def _logprobs(self, piece: Piece, first: bool) -> Parts:
        body, prompt = self._prompt.body, self._prompt
        if self._lists is None:
            self._lists = CompletionLogprobLists(
                body.logprobs or 0,
                prompt.tokenizer,
                as_ids=bool(body.return_tokens_as_token_ids),
                skip_special_tokens=body.skip_special_tokens is not False,
                offset=len(prompt.echo),
            )
        own = self._lists.fragments(piece.logprobs)
        return with_members({}, completion_logprobs(*([prompt.fragments] if first else []), own))
