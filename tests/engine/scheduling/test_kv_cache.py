from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool, OutOfBlocks, hash_block
from tests.tiers import examples

KEY = b"tenant"


def hashes_of(tokens: list[int], cache_key: bytes = KEY) -> list[bytes]:
    hashes = [cache_key]
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        hashes.append(hash_block(hashes[-1], tokens[start : start + BLOCK_SIZE]))
    return hashes[1:]


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate blocks for `tokens`, and add the full ones to the prefix cache."""
    blocks = [pool.allocate() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
    for block, block_hash in zip(blocks, hashes_of(tokens), strict=False):
        pool.add_to_prefix_cache(block, block_hash)
    return blocks


def test_block_pool_allocates_lowest_first_until_out_of_blocks() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release([0, 1, 2])
    assert (pool.free, pool.cached, pool.available) == (3, 0, 3)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_find_prefix_never_includes_last_token(length: int) -> None:
    pool = BlockPool(8)
    tokens = list(range(length))
    blocks = fill(pool, tokens)
    found, hashes = pool.find_prefix(KEY, tokens)
    assert found == blocks[: (length - 1) // BLOCK_SIZE]
    assert hashes == hashes_of(tokens)[: len(found)]
    assert len(found) * BLOCK_SIZE < length


def test_find_prefix_matches_block_only_after_its_parent() -> None:
    pool = BlockPool(8)
    same = list(range(100, 100 + BLOCK_SIZE))
    first = fill(pool, [1] * BLOCK_SIZE + same)
    assert pool.find_prefix(KEY, [2] * BLOCK_SIZE + same + [0]) == ([], [])
    assert pool.find_prefix(KEY, same + same + [0]) == ([], [])
    assert pool.find_prefix(KEY, [1] * BLOCK_SIZE + same + [0])[0] == first
    assert pool.find_prefix(KEY, [1] * BLOCK_SIZE + [*same[:-1], 5, 0])[0] == first[:1]


def test_find_prefix_finds_no_block_of_another_cache_key() -> None:
    pool = BlockPool(8)
    tokens = list(range(2 * BLOCK_SIZE))
    blocks = fill(pool, tokens)
    assert pool.find_prefix(b"other", [*tokens, 0]) == ([], [])
    assert pool.find_prefix(b"", [*tokens, 0]) == ([], [])
    assert pool.find_prefix(KEY, [*tokens, 0])[0] == blocks
    assert not set(hashes_of(tokens)) & set(hashes_of(tokens, b"other"))


def test_block_pool_evicts_released_prefix_from_its_end() -> None:
    pool = BlockPool(4)
    tokens = list(range(3 * BLOCK_SIZE))
    blocks = fill(pool, tokens)
    pool.release(blocks)
    assert (pool.free, pool.cached) == (1, 3)
    assert pool.find_prefix(KEY, [*tokens, 0])[0] == blocks
    pool.allocate()  # the free one
    assert pool.find_prefix(KEY, [*tokens, 0])[0] == blocks
    pool.allocate()  # evicts the deepest block of the prefix
    assert pool.find_prefix(KEY, [*tokens, 0])[0] == blocks[:2]


def test_block_pool_evicts_least_recently_used_prefix_first() -> None:
    pool = BlockPool(2)
    old, new = [1] * BLOCK_SIZE, [2] * BLOCK_SIZE
    for tokens in (old, new):
        pool.release(fill(pool, tokens))
    for block in pool.find_prefix(KEY, [*old, 0])[0]:  # used again: now more recent than the other
        pool.share(block)
        pool.release([block])
    pool.allocate()
    assert pool.find_prefix(KEY, [*old, 0])[0]
    assert not pool.find_prefix(KEY, [*new, 0])[0]


def test_prefix_cache_keeps_first_block_of_a_hash() -> None:
    pool = BlockPool(4)
    tokens = [7] * BLOCK_SIZE
    first, second = fill(pool, tokens), fill(pool, tokens)
    assert pool.find_prefix(KEY, [*tokens, 0])[0] == first
    pool.release(second)
    assert (pool.free, pool.cached) == (3, 0)
    pool.release(first)
    assert (pool.free, pool.cached) == (3, 1)


def test_block_pool_without_caching_keeps_nothing() -> None:
    pool = BlockPool(2, caching=False)
    pool.release(fill(pool, [1] * 20))
    assert pool.find_prefix(KEY, [1] * 20) == ([], [])
    assert (pool.free, pool.cached) == (2, 0)


class BlockPoolMachine(RuleBasedStateMachine):
    """Random owners of blocks, checked against a plain reference count."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.owners: list[list[int]] = []

    @rule(kind=st.integers(0, 2), length=st.integers(1, 4 * BLOCK_SIZE))
    def acquire(self, kind: int, length: int) -> None:
        tokens = [kind] * length
        found, hashes = self.pool.find_prefix(KEY, tokens)
        for block in found:
            self.pool.share(block)
        blocks = list(found)
        try:
            for _ in range(-(-length // BLOCK_SIZE) - len(found)):
                blocks.append(self.pool.allocate())
        except OutOfBlocks:
            assert self.pool.available == 0
            self.pool.release(blocks)
            return
        for block, block_hash in zip(blocks, hashes_of(tokens), strict=False):
            self.pool.add_to_prefix_cache(block, block_hash)
        assert hashes == hashes_of(tokens)[: len(hashes)]
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owners))
        for block in blocks:
            self.pool.share(block)
        self.owners.append(list(blocks))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def every_block_has_one_state(self) -> None:
        check_pool(self.pool, self.owners)


def check_pool(pool: BlockPool, owners: list[list[int]]) -> None:
    """Check that each block is in use, cached or free, with the right reference count."""
    held = [block for blocks in owners for block in blocks]
    free, cached = set(pool._free), set(pool._cached)
    assert len(free) == len(pool._free)
    assert not free & cached
    assert not (free | cached) & set(held)
    assert free | cached | set(held) == set(range(pool.total))
    assert [pool.ref_count(block) for block in range(pool.total)] == [held.count(block) for block in range(pool.total)]
    assert {pool._hashes[block] for block in free} <= {None}
    assert {known: block for block, known in enumerate(pool._hashes) if known is not None} == pool._block_by_hash


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
