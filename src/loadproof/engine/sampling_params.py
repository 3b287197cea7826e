"""What a caller may ask of a completion: :class:`SamplingParams`, validated when it is made."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_TOKENS = 2**31 - 1

# Bounds (inclusive) of the float settings. Those of temperature and the repetition penalty keep scaled
# logits finite in float32; the others are vLLM's and OpenAI's.
_RANGES = {
    "temperature": (0.0, 1e6),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-4, 1e4),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose a completion's tokens and where to end it; names and defaults are vLLM's.

    The token at position t depends on the logits at t, these parameters and (seed, t) only. Every field is
    checked when the object is made: :class:`ValueError` names the offending one. Token ids and
    ``logprobs`` are checked against the model when a request is added.
    """

    n: int = 1
    """Completions of the prompt; completion i samples with seed ``seed + i``, so each can be had alone."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the best token, ties to the lowest id."""
    top_p: float = 1.0
    """Keep the fewest best tokens whose probabilities reach this sum; in (0, 1]."""
    top_k: int = 0
    """Keep this many best tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the best one's probability."""
    max_tokens: int | None = 16
    """End after so many tokens, or at the model's limit where that comes first; None goes on to it."""
    min_tokens: int = 0
    """Before so many tokens, end-of-sequence and stop ids cannot be sampled and stop strings don't count."""
    stop: Sequence[str] = ()
    """End where the text first holds one of these; a string or several, kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """End after one of these tokens; its own text is left out."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    seed: int | None = None
    """Key of the random numbers, taken modulo 2**64; None has the engine choose one and report it."""
    logprobs: int | None = None
    """Log-probabilities of so many best tokens at each position, and of the chosen one; -1 for all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """Subtracted from logits for each time that the output holds the token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; from -100 to 100."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the stop token's text, at the end of the text."""
    prompt_logprobs: int | None = None
    """Log-probabilities of so many best tokens at each position of the prompt, and of the prompt's own; -1
    for all."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _set(self, name, _number(name, getattr(self, name), low, high))
        _set(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValueError("top_p must be in (0, 1], not 0")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        self._check_integers()
        _set(self, "stop", _stops(self.stop))
        _set(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        _set(self, "logit_bias", _logit_bias(self.logit_bias))

    def _check_integers(self) -> None:
        _set(self, "n", _integer("n", self.n, 1, MAX_N))
        _set(self, "top_k", max(0, _integer("top_k", self.top_k, -1, MAX_TOKENS)))
        _set(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None:
            _set(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS))
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.seed is not None:
            _set(self, "seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _set(self, name, _integer(name, getattr(self, name), -1, MAX_TOKENS))

    @property
    def uses_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _set(params: SamplingParams, name: str, value: object) -> None:
    # Normalising inside __post_init__ is the only writing that a frozen dataclass ever sees.
    object.__setattr__(params, name, value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return number


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        integer = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not low <= integer <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {integer}")
    return integer


def _items(name: str, values: Any, limit: int) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a list, not {values!r}")
    items = list(values)
    if len(items) > limit:
        raise ValueError(f"{name} holds {len(items)} entries; at most {limit} are allowed")
    return items


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    items = [stop] if isinstance(stop, str) else _items("stop", stop, MAX_STOPS)
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f"stop must hold strings that are not empty, not {item!r}")
        if len(item) > MAX_STOP_CHARS:
            raise ValueError(f"a stop string of {len(item)} characters; at most {MAX_STOP_CHARS} are allowed")
    return tuple(items)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    items = _items("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
    return tuple(_integer("stop_token_ids", item, 0, MAX_TOKENS) for item in items)


def _logit_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias holds {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return {
        _integer("logit_bias", token_id, 0, MAX_TOKENS): _number("logit_bias", value, -100.0, 100.0)
        for token_id, value in bias.items()
    }
