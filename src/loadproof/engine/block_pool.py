"""The key-value cache's blocks: who holds them, and which contents can be had again by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loadproof.engine.invariant import require
from loadproof.engine.prompt_scores import BlockScores


class BlockKey(NamedTuple):
    """What a full block holds.

    ``digest`` is SHA-256 over the parent's digest and the block's tokens, so it names the whole prefix;
    ``tokens`` are the block's own, as bytes, and compared on a hit.
    """

    digest: bytes
    tokens: bytes


class BlockPool:
    """Hands out block numbers ``0..num_blocks - 1``; the device owns the memory behind them.

    A block is held by any number of sequences. One that nobody holds is free: either blank or, where its
    contents were published, cached until it is needed. Blank blocks go first, most recently freed first,
    so that a lightly loaded engine stays in few pages; then cached ones, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.clear()

    def clear(self) -> None:
        """Hold nothing and offer nothing."""
        num_blocks = self.num_blocks
        self._holders = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # published blocks that nobody holds, oldest first
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._scores: dict[int, BlockScores] = {}  # by published block

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones among them."""
        return len(self._blank) + len(self._cached)

    @property
    def num_blank_blocks(self) -> int:
        """Free blocks whose contents nobody can have again."""
        return len(self._blank)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents can be had again, held or not."""
        return len(self._published)

    def num_holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def key_of(self, block: int) -> BlockKey | None:
        """What a published block holds; None for others."""
        return self._keys[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks of any contents; the caller has checked that so many are free."""
        assert 0 <= count <= self.num_free_blocks, f"{count} blocks wanted, {self.num_free_blocks} free"
        return [self._take() for _ in range(count)]

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The published blocks of the longest run of ``keys`` from the first; this holds none of them."""
        found = []
        for key in keys:
            block = self._published.get(key.digest)
            if block is None or self._keys[block] != key:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of these count as free as long as nobody holds them."""
        return sum(not self._holders[block] for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold published blocks once more."""
        for block in blocks:
            assert self._keys[block] is not None, f"block {block} was never published"
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1

    def publish(self, block: int, key: BlockKey) -> None:
        """Offer a held block as a hit: its contents exist now and never change while it is published.

        Where another block offers the same already, that one stays the only one.
        """
        assert self._holders[block], f"block {block} is published, but nobody holds it"
        assert self._keys[block] in (None, key), f"block {block} is published as something else"
        if key.digest not in self._published:
            self._published[key.digest] = block
            self._keys[block] = key

    def keep_scores(self, block: int, scores: BlockScores) -> None:
        """Keep what scoring found about a published block's tokens, unless as much is there."""
        kept = self._scores.get(block)
        if self._keys[block] is not None and (kept is None or scores.says_more_than(kept)):
            self._scores[block] = scores

    def scores_of(self, block: int) -> BlockScores | None:
        """What was kept about a block's tokens."""
        return self._scores.get(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold of each block of a sequence, in the order of their positions.

        The last ones count as used longest ago: without its predecessors a block is of no use to anybody.
        """
        for block in reversed(blocks):
            assert self._holders[block], f"block {block} freed twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def forget(self) -> None:
        """Offer nothing any more; whoever holds a block keeps it."""
        self._blank.extend(self._cached)
        self._cached.clear()
        for block in self._published.values():
            self._keys[block] = None
        self._published.clear()
        self._scores.clear()

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
            self.num_evictions += 1
        assert not self._holders[block], f"block {block} was free and held at once"
        self._holders[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        assert self._published[key.digest] == block
        del self._published[key.digest]
        self._scores.pop(block, None)
        self._keys[block] = None

    def differently_held(self, counts: Sequence[int]) -> list[int]:
        """Blocks that aren't held just as often as ``counts``, one entry a block, says."""
        if counts == self._holders:
            return []
        return [block for block, count in enumerate(counts) if count != self._holders[block]]

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` where the books on free, held and published blocks disagree."""
        unheld = [block for block, count in enumerate(self._holders) if not count]
        free = sorted([*self._blank, *self._cached])
        require(free == unheld, "free blocks are lost, doubled or held")
        keys = self._keys
        require(not any(keys[block] for block in self._blank), "a blank block is published")
        require(all(keys[block] for block in self._cached), "a cached block has no key")
        named = {key.digest: block for block, key in enumerate(self._keys) if key is not None}
        require(self._scores.keys() <= set(named.values()), "scores are kept of a block without a key")
        require(named == self._published, "published blocks and their keys disagree")
