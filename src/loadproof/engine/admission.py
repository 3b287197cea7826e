"""The engine's door: everything about a request that depends on the model is checked here."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from loadproof.engine.prompt_scores import PromptScores
from loadproof.engine.sampling_params import SamplingParams

MOST_PROMPT_LOGPROBS = 1 << 27  # eight bytes each


class RequestError(ValueError):
    """A request that this model cannot serve; the message says why, with the numbers.

    ``prompt_index`` is the place of the prompt that was refused among those of one call, where it was one.
    """

    prompt_index: int | None = None


class TooLongError(RequestError):
    """A prompt that leaves no room for a token within the model's length."""


class ClosedError(RequestError):
    """The engine was closed before the request, or while it was being served."""


@dataclass(frozen=True)
class Door:
    """What a model and its settings allow."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int  # -1 for no limit
    eos_token_ids: frozenset[int]

    def check_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt as a list; it has at least one token, all known, and leaves room for another."""
        count = len(token_ids)
        if count == 0:
            raise RequestError("the prompt is empty: it has no tokens")
        if count >= self.max_model_len:
            raise TooLongError(
                f"the prompt has {count} tokens; at most {self.max_model_len - 1} fit, "
                f"with one to generate, in max_model_len {self.max_model_len}"
            )
        ids = [token_id if type(token_id) is int else _integer(token_id) for token_id in token_ids]
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        return ids

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that name unknown tokens, too many log-probabilities or leave no token."""
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            wrong = max(ids, default=0)
            if wrong >= self.vocab_size:
                raise RequestError(f"{name}: {wrong} is outside the vocabulary of {self.vocab_size}")
        allowed = self.vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, self.vocab_size)
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            wanted = self.num_top(asked or 0)
            if wanted > allowed:
                raise RequestError(f"{name} {wanted} is above the limit of {allowed}")
        banned = {*params.stop_token_ids, *self.eos_of(params)}
        if params.min_tokens and len(banned) >= self.vocab_size:
            raise RequestError("min_tokens with every token a stop token leaves none to sample")

    def num_top(self, logprobs: int) -> int:
        """How many best tokens a number of log-probabilities means."""
        return self.vocab_size if logprobs == -1 else logprobs

    def check_prompt_logprobs(self, params: SamplingParams, num_tokens: int) -> None:
        """Refuse log-probabilities of a prompt beyond a sensible size."""
        num_top = self.num_top(params.prompt_logprobs or 0)
        if num_tokens * num_top > MOST_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs {num_top} of a prompt of {num_tokens} tokens are more than "
                f"{MOST_PROMPT_LOGPROBS} log-probabilities"
            )

    def prompt_scores(self, params: SamplingParams, token_ids: list[int]) -> PromptScores | None:
        """Room for the prompt's log-probabilities, if they are wanted."""
        if params.prompt_logprobs is None:
            return None
        return PromptScores(token_ids, self.num_top(params.prompt_logprobs))

    def eos_of(self, params: SamplingParams) -> frozenset[int]:
        """End-of-sequence tokens that count for a request."""
        return frozenset() if params.ignore_eos else self.eos_token_ids

    def max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Tokens to generate at most: what was asked for, or to the model's limit."""
        room = self.max_model_len - num_prompt_tokens
        return room if params.max_tokens is None else min(params.max_tokens, room)


def check_placing(priority: object, cache_salt: object, policy: str) -> None:
    """Refuse a priority or a cache salt that can't be one, or that would be ignored."""
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority must be an integer of 64 bits, not {priority!r}")
    if priority and policy != "priority":
        raise RequestError(f"priority {priority} with scheduling policy {policy!r}: it needs 'priority'")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt must be text that is not empty, not {cache_salt!r}")


def _integer(token_id: object) -> int:
    """NumPy's integers and their like are token ids too."""
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"a prompt's token ids are integers, not {token_id!r}")
