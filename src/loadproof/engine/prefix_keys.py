"""Names of prefixes: a hash chain over the full blocks of a sequence."""

from __future__ import annotations

import hashlib
from array import array

from loadproof.engine.block_pool import BlockKey
from loadproof.engine.request import Request

INT32 = "i"  # the array type code of the bytes that are hashed and compared


def root_digest(cache_salt: str | None, generation: int) -> bytes:
    """The parent of first blocks: other salts and generations share nothing.

    ``generation`` counts resets of the cache: a sequence that began before one keeps its old names.
    """
    # A lone surrogate, which JSON can hold, is text too.
    salt = b"-" if cache_salt is None else b"+" + cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(generation.to_bytes(8, "little") + salt).digest()


class PrefixKeys:
    """Keys of a sequence's full blocks, made as its tokens become known."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.keys: list[BlockKey] = []
        self._block_size = block_size

    def extend(self, request: Request) -> None:
        """Bring the keys up to the blocks which the request's known tokens fill."""
        size = self._block_size
        # Tokens are taken back where a step failed before anybody was shown them.
        del self.keys[request.num_tokens // size :]
        begin = len(self.keys) * size
        num_new = (request.num_tokens - begin) // size
        if num_new == 0:
            return
        tokens = array(INT32, request.tokens_between(begin, begin + num_new * size))
        digest = self.keys[-1].digest if self.keys else self.root
        for start in range(0, num_new * size, size):
            part = tokens[start : start + size].tobytes()
            digest = hashlib.sha256(digest + part).digest()
            self.keys.append(BlockKey(digest, part))
