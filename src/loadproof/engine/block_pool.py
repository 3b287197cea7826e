"""The key-value cache's blocks: which are free and which are held."""

from __future__ import annotations


class BlockPool:
    """Hands out block numbers ``0..num_blocks - 1``; the device owns the memory behind them.

    Free blocks are handed out most recently freed first, so a lightly loaded engine stays in few pages.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held = bytearray(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has checked that so many are free."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            assert not self._held[block], f"block {block} was free and held at once"
            self._held[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back, each exactly once."""
        for block in reversed(blocks):
            assert self._held[block], f"block {block} freed twice"
            self._held[block] = 0
            self._free.append(block)
