from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, ROOT, BlockPool, OutOfBlocks, chain


def names_of(tokens: list[int]) -> list[bytes]:
    names = [ROOT]
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        names.append(chain(names[-1], tokens[start : start + BLOCK_SIZE]))
    return names[1:]


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks for all of `tokens`, the complete ones named."""
    blocks = [pool.allocate() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
    for block, name in zip(blocks, names_of(tokens), strict=False):
        pool.name(block, name)
    return blocks


def test_blocks_come_lowest_first_and_run_out() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release([0, 1, 2])
    assert (pool.free, pool.cached, pool.available) == (3, 0, 3)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_a_known_prefix_never_includes_the_last_token(length: int) -> None:
    pool = BlockPool(8)
    tokens = list(range(length))
    blocks = fill(pool, tokens)
    found, names = pool.find(tokens)
    assert found == blocks[: (length - 1) // BLOCK_SIZE]
    assert names == names_of(tokens)[: len(found)]
    assert len(found) * BLOCK_SIZE < length


def test_a_block_is_found_only_behind_its_own_past() -> None:
    pool = BlockPool(8)
    same = list(range(100, 100 + BLOCK_SIZE))
    first = fill(pool, [1] * BLOCK_SIZE + same)
    assert pool.find([2] * BLOCK_SIZE + same + [0]) == ([], [])
    assert pool.find(same + same + [0]) == ([], [])
    assert pool.find([1] * BLOCK_SIZE + same + [0])[0] == first
    assert pool.find([1] * BLOCK_SIZE + [*same[:-1], 5, 0])[0] == first[:1]


def test_released_prefixes_stay_until_their_room_is_needed_ends_first() -> None:
    pool = BlockPool(4)
    tokens = list(range(3 * BLOCK_SIZE))
    blocks = fill(pool, tokens)
    pool.release(blocks)
    assert (pool.free, pool.cached) == (1, 3)
    assert pool.find([*tokens, 0])[0] == blocks
    pool.allocate()  # the free one
    assert pool.find([*tokens, 0])[0] == blocks
    pool.allocate()  # evicts the deepest block of the prefix
    assert pool.find([*tokens, 0])[0] == blocks[:2]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2)
    old, new = [1] * BLOCK_SIZE, [2] * BLOCK_SIZE
    for tokens in (old, new):
        pool.release(fill(pool, tokens))
    for block in pool.find([*old, 0])[0]:  # used again: now it is the younger one
        pool.share(block)
        pool.release([block])
    pool.allocate()
    assert pool.find([*old, 0])[0]
    assert not pool.find([*new, 0])[0]


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(4)
    tokens = [7] * BLOCK_SIZE
    first, second = fill(pool, tokens), fill(pool, tokens)
    assert pool.find([*tokens, 0])[0] == first
    pool.release(second)
    assert (pool.free, pool.cached) == (3, 0)
    pool.release(first)
    assert (pool.free, pool.cached) == (3, 1)


def test_without_caching_nothing_is_kept() -> None:
    pool = BlockPool(2, caching=False)
    pool.release(fill(pool, [1] * 20))
    assert pool.find([1] * 20) == ([], [])
    assert (pool.free, pool.cached) == (2, 0)


class Pool(RuleBasedStateMachine):
    """Random owners against a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.owners: list[list[int]] = []

    @rule(kind=st.integers(0, 2), length=st.integers(1, 4 * BLOCK_SIZE))
    def come(self, kind: int, length: int) -> None:
        tokens = [kind] * length
        found, names = self.pool.find(tokens)
        for block in found:
            self.pool.share(block)
        mine = list(found)
        try:
            for _ in range(-(-length // BLOCK_SIZE) - len(found)):
                mine.append(self.pool.allocate())
        except OutOfBlocks:
            assert self.pool.available == 0
            self.pool.release(mine)
            return
        for block, name in zip(mine, names_of(tokens), strict=False):
            self.pool.name(block, name)
        assert names == names_of(tokens)[: len(names)]
        self.owners.append(mine)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owners))
        for block in blocks:
            self.pool.share(block)
        self.owners.append(list(blocks))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        check_pool(self.pool, self.owners)


def check_pool(pool: BlockPool, owners: list[list[int]]) -> None:
    """In use, cached or free: each block exactly one of them, and counted as often as it is held."""
    held = [block for blocks in owners for block in blocks]
    free, cached = set(pool._free), set(pool._cached)
    assert len(free) == len(pool._free)
    assert not free & cached
    assert not (free | cached) & set(held)
    assert free | cached | set(held) == set(range(pool.total))
    assert [pool.users(block) for block in range(pool.total)] == [held.count(block) for block in range(pool.total)]
    assert {pool._names[block] for block in free} <= {None}
    assert {name: block for block, name in enumerate(pool._names) if name is not None} == pool._by_name


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
