from __future__ import annotations

import pytest

from loadproof.engine.block_pool import BlockPool


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3) + pool.allocate(2)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_freed_blocks_come_back() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.release(blocks[1:3])
    assert pool.num_free_blocks == 2
    assert sorted(pool.allocate(2)) == sorted(blocks[1:3])


@pytest.mark.skipif(not __debug__, reason="asserts are off")
def test_what_no_caller_may_do_is_asserted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)
