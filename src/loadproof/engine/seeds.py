"""Seeds for requests that come without one."""

from __future__ import annotations

import hashlib
import secrets

# Every client can hold a 48-bit integer exactly, JavaScript's doubles included.
_BITS = 48


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's completion ``index``: the next ones up, past 2**64 - 1 from 0 again."""
    following = seed + index
    return following if following < 2**64 else following - 2**64


class SeedSource:
    """Gives each request without a seed one that is then reported.

    With an engine seed the k-th is a hash of (engine seed, k), so a run that adds the same requests in the
    same order repeats; without one it is random.
    """

    def __init__(self, engine_seed: int | None) -> None:
        self._engine_seed = engine_seed
        self._count = 0

    def next(self) -> int:
        """A seed of 48 bits."""
        if self._engine_seed is None:
            return secrets.randbits(_BITS)
        text = f"{self._engine_seed}:{self._count}"
        self._count += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_BITS // 8).digest())
