"""The pool of blocks, against a plain model of what it should hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loadproof.engine.block_pool import BlockKey, BlockPool


def key(name: int) -> BlockKey:
    return BlockKey(f"digest {name}".encode(), f"tokens {name}".encode())


def published(pool: BlockPool, *names: int) -> list[int]:
    """Blocks that offer these contents, held once."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, key(name))
    return blocks


def found(pool: BlockPool, *names: int) -> list[int]:
    return pool.find(key(name) for name in names)


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3) + pool.allocate(2)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    assert pool.allocate(0) == []


def test_blank_blocks_freed_last_come_back_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.release(blocks[1:3])
    assert pool.num_free_blocks == 2
    assert pool.allocate(2) == blocks[1:3]


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = published(pool, 1)
    pool.hold(blocks)
    assert pool.num_holders(blocks[0]) == 2
    pool.release(blocks)
    assert (pool.num_holders(blocks[0]), pool.num_free_blocks, pool.num_unheld(blocks)) == (1, 1, 0)
    pool.release(blocks)
    assert (pool.num_holders(blocks[0]), pool.num_free_blocks, pool.num_unheld(blocks)) == (0, 2, 1)


def test_a_free_block_is_found_until_it_is_taken() -> None:
    pool = BlockPool(2)
    pool.release(blocks := published(pool, 1, 2))
    assert found(pool, 1, 2) == blocks
    assert pool.num_evictions == 0
    (taken,) = pool.allocate(1)
    assert taken == blocks[1], "the last block of a sequence goes before what it is of no use without"
    assert pool.num_evictions == 1
    assert found(pool, 1, 2) == blocks[:1]
    assert pool.key_of(taken) is None


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, blank, other = pool.allocate(3)
    pool.publish(cached, key(1))
    pool.release([cached])
    pool.release([blank])
    pool.release([other])
    assert pool.allocate(2) == [other, blank]
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [cached]
    assert pool.num_evictions == 1


def test_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(3)
    first, second, third = published(pool, 1, 2, 3)
    for block in (first, second, third):
        pool.release([block])
    pool.hold([first])
    pool.release([first])
    assert pool.allocate(3) == [second, third, first]


def test_only_the_run_from_the_first_is_found() -> None:
    pool = BlockPool(4)
    blocks = published(pool, 1, 2, 4)
    assert found(pool, 1, 2, 3, 4) == blocks[:2]
    assert found(pool, 3, 1) == []
    assert found(pool) == []


def test_tokens_are_compared_so_that_a_collision_is_no_hit() -> None:
    pool = BlockPool(2)
    published(pool, 1)
    assert pool.find([BlockKey(key(1).digest, b"other tokens")]) == []
    (other,) = pool.allocate(1)
    pool.publish(other, BlockKey(key(1).digest, b"other tokens"))
    assert pool.key_of(other) is None, "it is offered under a name that means something else"
    assert len(found(pool, 1)) == 1
    pool.check_integrity()


def test_the_same_contents_are_offered_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    assert found(pool, 1) == [first]
    assert pool.num_cached_blocks == 1
    pool.release([first])
    pool.release([second])
    assert pool.allocate(2) == [second, first]


def test_what_is_forgotten_is_found_no_more_and_stays_held() -> None:
    pool = BlockPool(3)
    free, held = published(pool, 1, 2)
    pool.release([free])
    pool.forget()
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 2)
    assert found(pool, 1) == found(pool, 2) == []
    pool.publish(held, key(3))
    assert found(pool, 3) == [held]
    pool.check_integrity()


@pytest.mark.skipif(not __debug__, reason="asserts are off")
def test_what_no_caller_may_do_is_asserted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="never published"):
        pool.hold(blocks)
    pool.publish(blocks[0], key(1))
    with pytest.raises(AssertionError, match="published as something else"):
        pool.publish(blocks[0], key(2))
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.publish(blocks[0], key(1))


@dataclass
class Model:
    """What a pool should hold, in the plainest terms: every list is in the order of its use."""

    holders: dict[int, int]
    blank: list[int]  # the last goes first
    cached: list[int] = field(default_factory=list)  # the first goes first
    names: dict[int, int] = field(default_factory=dict)  # block -> what it offers
    num_evictions: int = 0

    def offering(self, name: int) -> int | None:
        return next((block for block, known in self.names.items() if known == name), None)

    def take(self) -> int:
        if self.blank:
            block = self.blank.pop()
        else:
            block = self.cached.pop(0)
            del self.names[block]
            self.num_evictions += 1
        self.holders[block] = 1
        return block

    def release(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            (self.cached if block in self.names else self.blank).append(block)


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, publish, find, share and give up blocks in any order."""

    NAMES = st.integers(0, 9)

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.model = Model(dict.fromkeys(range(num_blocks), 0), list(range(num_blocks - 1, -1, -1)))
        self.sequences: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.model.blank) + len(self.model.cached)))
        blocks = self.pool.allocate(count)
        assert blocks == [self.model.take() for _ in range(count)]
        self.sequences.append(blocks)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), name=NAMES)
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from([block for blocks in self.sequences for block in blocks]))
        if self.model.names.get(block, name) != name:
            return
        self.pool.publish(block, key(name))
        if self.model.offering(name) is None:
            self.model.names[block] = name

    @rule(names=st.lists(NAMES, max_size=4, unique=True), hold=st.booleans())
    def find(self, names: list[int], hold: bool) -> None:
        expected: list[int] = []
        for block in map(self.model.offering, names):
            if block is None:
                break
            expected.append(block)
        blocks = found(self.pool, *names)
        assert blocks == expected
        assert self.pool.num_unheld(blocks) == sum(not self.model.holders[block] for block in blocks)
        if hold:
            self.pool.hold(blocks)
            for block in blocks:
                self.model.holders[block] += 1
                if block in self.model.cached:
                    self.model.cached.remove(block)
            self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.model.release(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.model.names.clear()
        self.model.blank += self.model.cached
        self.model.cached.clear()

    @invariant()
    def agrees(self) -> None:
        pool, model = self.pool, self.model
        pool.check_integrity()
        assert {block: pool.num_holders(block) for block in model.holders} == model.holders
        assert pool.num_free_blocks == len(model.blank) + len(model.cached)
        assert pool.num_blank_blocks == len(model.blank)
        assert pool.num_cached_blocks == len(model.names)
        assert pool.num_evictions == model.num_evictions
        for block in model.holders:
            assert pool.key_of(block) == (key(model.names[block]) if block in model.names else None)


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
