"""What a caller gets of a scored prompt: a list of dicts that are made when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from loadproof.devices.device import F32, I32
from loadproof.engine.output import PositionLogprobs, position_logprobs
from loadproof.engine.prompt_scores import PromptScores


class PromptLogprobs(Sequence["PositionLogprobs | None"]):
    """One entry a prompt token: None for the first, then a dict by token id, the prompt's own token first.

    The dicts of a long prompt take a hundred times the memory of the numbers in them, so each is made
    anew from the arrays when asked for. Those who want numbers take the arrays, ``[P - 1]`` from the second
    token on: ``token_logprobs`` and ``token_ranks`` (1 is the most likely).
    """

    def __init__(self, scores: PromptScores, decode: Callable[[int], str]) -> None:
        assert scores.done
        self._scores = scores
        self._decode = decode

    @property
    def token_logprobs(self) -> F32:
        """Natural log-probabilities of the prompt's tokens but the first."""
        return self._scores.logprobs

    @property
    def token_ranks(self) -> I32:
        """Their ranks."""
        return self._scores.ranks

    def __len__(self) -> int:
        return len(self._scores.targets) + 1

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self._entry(place) for place in places]
        return self._entry(places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def _entry(self, place: int) -> PositionLogprobs | None:
        if place == 0:
            return None
        scores, at = self._scores, place - 1
        best = zip(scores.top_ids[at].tolist(), scores.top_logprobs[at].tolist(), strict=True)
        logprob, rank = float(scores.logprobs[at]), int(scores.ranks[at])
        return position_logprobs(int(scores.targets[at]), logprob, rank, best, self._decode)
