"""A second sampler, plain NumPy in float64, written from the rules alone: what the native one must give.

Where a sum of float32 weights could round to either side of a limit, it answers with every token that a
relative error of ``TOLERANCE`` allows; away from limits that is one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Words = tuple[int, int, int, int]

TOLERANCE = 1e-5
_LARGEST = np.finfo(np.float32).max
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of one row, named as the native function names them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    history: list[int] = field(default_factory=list)
    num_prompt: int = 0
    bias_ids: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    num_logprobs: int = -1


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 as the Random123 paper defines it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The row's random number: 53 bits of the first two words, in [0, 1)."""
    words = philox4x32((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))
    return float(((words[0] << 32 | words[1]) >> 11) / 2**53)


def readable(logits: F32) -> F64:
    """NaN as minus infinity, plus infinity as the largest float32."""
    return np.minimum(np.where(np.isnan(logits), -np.inf, logits.astype(np.float64)), float(_LARGEST))


def adjusted(logits: F32, s: Settings) -> F32:
    """Float32 logits after penalties and bias."""
    x = logits.copy()
    output = s.history[s.num_prompt :]
    with np.errstate(over="ignore", invalid="ignore"):
        for token in set(s.history):
            penalty = np.float32(s.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
            count = output.count(token)
            x[token] -= np.float32(s.frequency_penalty) * np.float32(count)
            x[token] -= np.float32(s.presence_penalty if count else 0.0)
        for token, bias in zip(s.bias_ids, s.bias_values, strict=True):
            x[token] = -np.inf if bias == -np.inf else x[token] + np.float32(bias)
    return x


def in_order(x: F64) -> I64:
    """Ids by falling logit, ties by rising id."""
    return np.lexsort((np.arange(x.size), -x)).astype(np.int64)


def weights(x: F64, temperature: float) -> F64:
    """Probabilities over that of the best token."""
    shifted: F64 = x - x.max()
    return np.exp(shifted / float(np.float32(temperature)))


def survivors(x: F64, s: Settings, top_p: float, min_p: float) -> I64:
    """Ids that min-p, top-k and top-p leave, best first."""
    w = weights(x, s.temperature)
    kept = in_order(x)
    kept = kept[w[kept] >= min_p]
    if s.top_k > 0:
        kept = kept[: s.top_k]
    if s.top_p < 1.0:
        reached = np.cumsum(w[kept]) / w[kept].sum()
        kept = kept[: 1 + int(np.count_nonzero(reached[:-1] < top_p))]
    return kept


def _drawn(x: F64, s: Settings, kept: I64) -> Iterator[int]:
    ids = np.sort(kept)
    w = weights(x, s.temperature)[ids]
    ends = np.cumsum(w) / w.sum()
    starts = np.concatenate(([0.0], ends[:-1]))
    u = uniform(s.seed, s.position)
    possible = (starts <= u + TOLERANCE) & (ends >= u - TOLERANCE) & (w > 1e-37)
    yield from ids[possible].tolist()


def possible_tokens(logits: F32, s: Settings) -> set[int]:
    """The token to be sampled, and those that rounding could give instead."""
    x = readable(adjusted(logits, s))
    if x.max() == -np.inf:
        banned = {t for t, bias in zip(s.bias_ids, s.bias_values, strict=True) if bias == -np.inf}
        return {next((t for t in range(x.size) if t not in banned), 0)}
    if s.temperature < 1e-5:
        return {int(x.argmax())}
    sizes = [
        survivors(x, s, top_p, min_p).size
        for top_p in _around(s.top_p, off=1.0)
        for min_p in _around(s.min_p, off=0.0)
    ]
    order = in_order(x)
    if max(sizes) - min(sizes) > 100:  # a crowd at the limit: any prefix between could be meant
        return set(order[: max(sizes)].tolist())
    return {t for size in range(min(sizes), max(sizes) + 1) for t in _drawn(x, s, order[:size])}


def _around(share: float, off: float) -> list[float]:
    if share == off:
        return [off]
    exact = float(np.float32(share))
    return [exact * (1 - TOLERANCE), min(1.0, exact * (1 + TOLERANCE))]


def logprobs(logits: F32) -> F64:
    """Log-probabilities of the raw logits; minus infinity where a logit counts as that."""
    x = readable(logits)
    if x.max() == -np.inf:
        return np.full(x.size, -np.inf)
    shifted = x - x.max()
    result = np.maximum(shifted - np.log(np.exp(shifted).sum()), -float(_LARGEST))
    return np.where(x == -np.inf, -np.inf, result)


def rank(logits: F32, token: int) -> int:
    """One more than the number of greater logits."""
    x = readable(logits)
    return 1 + int(np.count_nonzero(x > x[token]))
