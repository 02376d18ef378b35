"""Paged KV cache bookkeeping: the block pool, the prefix cache and the block tables of sequences.

A block is in use (its reference count is above zero), cached (unreferenced, but holding a known prefix) or free. The
prefix cache finds a block by a hash over its tokens and its parent's hash, so a block matches only after the exact
prefix it was computed with. The chain of hashes begins with the request's cache key, so a tenant does not find the
blocks of another. Torch-free: the tensors live in the model's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syringa.engine.scheduling.scheduler_output import SchedulerOutput
    from syringa.engine.scheduling.sequence import Sequence

BLOCK_SIZE = 16  # BLOCK in native/attention.h


class OutOfBlocks(Exception):
    """No block is free or evictable: a sequence has to be preempted."""


def hash_block(parent: bytes, tokens: Seq[int], extra: bytes = b"") -> bytes:
    """Hash a full block. The parent of the first block is the request's cache key.

    `extra` covers content that the token ids do not identify, such as images.
    """
    return hashlib.blake2b(array("q", tokens).tobytes() + extra, key=parent, digest_size=16).digest()


class BlockPool:
    """Allocate, share and evict the blocks of the KV cache, with LRU eviction of cached prefixes."""

    def __init__(self, blocks: int, *, caching: bool = True) -> None:
        self.total = blocks
        self.caching = caching
        self._ref_counts = [0] * blocks
        self._hashes: list[bytes | None] = [None] * blocks
        # Lowest numbers first, so that memory that was never written stays untouched as long as possible.
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_by_hash: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated: free or evictable."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Return a block with a reference count of one, evicting a cached prefix if needed. Raises `OutOfBlocks`."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._evict(block)
        else:
            raise OutOfBlocks
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use or cached."""
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Seq[int]) -> None:
        """Drop one reference to each block, last block first, so that a prefix is evicted from its end."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def add_to_prefix_cache(self, block: int, block_hash: bytes) -> None:
        """Make a fully computed block findable by its hash. The first block with a hash keeps it."""
        if self.caching and block_hash not in self._block_by_hash and self._hashes[block] is None:
            self._block_by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def find_prefix(
        self, cache_key: bytes, tokens: Seq[int], hash_extra: Callable[[int, int], bytes] | None = None
    ) -> tuple[list[int], list[bytes]]:
        """Return the blocks of the longest cached prefix and their hashes, without adding references.

        The last token is never part of it, because the caller needs its logits. `hash_extra(start, end)` returns the
        `extra` of `hash_block` for those positions.
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        parent = cache_key
        if self.caching:
            for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
                end = start + BLOCK_SIZE
                parent = hash_block(parent, tokens[start:end], hash_extra(start, end) if hash_extra else b"")
                block = self._block_by_hash.get(parent)
                if block is None:
                    break
                blocks.append(block)
                hashes.append(parent)
        return blocks, hashes

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block] = None


def reserve_blocks(pool: BlockPool, output: SchedulerOutput, sequence: Sequence, tokens: int) -> None:
    """Extend a block table to hold `tokens` tokens, with a copy-on-write of a shared last block.

    Raises `OutOfBlocks`; what was allocated until then stays in the block table.
    """
    last = sequence.computed // BLOCK_SIZE
    if last < len(sequence.block_table) and pool.ref_count(sequence.block_table[last]) > 1:
        copy = pool.allocate()
        output.copies.append((sequence.block_table[last], copy))
        pool.release([sequence.block_table[last]])
        sequence.block_table[last] = copy
    for _ in range(sequence.missing_blocks(tokens)):
        sequence.block_table.append(pool.allocate())


def cache_full_blocks(pool: BlockPool, sequence: Sequence) -> None:
    """Add the full blocks of a sequence to the prefix cache, as far as the host knows their tokens."""
    if not sequence.request.use_cache:
        return
    full = min(sequence.computed, sequence.known) // BLOCK_SIZE
    images, hashes = sequence.prompt_images, sequence.block_hashes
    while len(hashes) < full:
        start, end = len(hashes) * BLOCK_SIZE, (len(hashes) + 1) * BLOCK_SIZE
        extra = images.block_hash_extra(start, end) if images else b""
        block_hash = hash_block(hashes[-1] if hashes else sequence.request.cache_key, sequence.tokens[start:end], extra)
        pool.add_to_prefix_cache(sequence.block_table[len(hashes)], block_hash)
        hashes.append(block_hash)


def free_blocks(pool: BlockPool, sequence: Sequence) -> None:
    """Release all blocks of a sequence; its tokens have to be computed again."""
    pool.release(sequence.block_table)
    sequence.block_table, sequence.block_hashes, sequence.computed = [], [], 0


def roll_back_blocks(pool: BlockPool, output: SchedulerOutput) -> list[Sequence]:
    """Release what an output that was not executed reserved beyond the computed tokens.

    Sequences that were to sample compute their last token again. Returns those for which that is not possible, because
    the last token belongs to a chunk that is computed whole: they have to start over.
    """
    lost = []
    for item in output.scheduled:
        for sequence in item.sampled:
            last = len(sequence.tokens) - 1
            images = sequence.prompt_images
            if images is not None and images.chunk_begin(last) < last < sequence.computed:
                lost.append(sequence)
            sequence.computed = min(sequence.computed, last)
        sequence = item.sequence
        needed = -(-sequence.computed // BLOCK_SIZE)
        pool.release(sequence.block_table[needed:])
        del sequence.block_table[needed:]
    return lost
