"""Who owns which block of the cache. Bookkeeping only: no tensor is touched here.

A block is in use (somebody refers to it), cached (nobody does, but it holds a known prefix), or free. Prefixes are
known by a chain of hashes, so a block is found only behind the very tokens that it was computed behind.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

BLOCK_SIZE = 16  # BLOCK in native/attention.h
ROOT = b"\0" * 16


class OutOfBlocks(Exception):
    """Nothing is free or can be evicted: somebody has to be preempted."""


def chain(parent: bytes, tokens: Seq[int], mark: bytes = b"") -> bytes:
    """The name of a block: its tokens, behind those of its parent; `mark` is what they do not tell of its content."""
    return hashlib.blake2b(array("q", tokens).tobytes() + mark, key=parent, digest_size=16).digest()


class BlockPool:
    def __init__(self, blocks: int, *, caching: bool = True) -> None:
        self.total = blocks
        self.caching = caching
        self._users = [0] * blocks
        self._names: list[bytes | None] = [None] * blocks
        # The lowest numbers first, so that memory which was never touched stays so as long as it can.
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_name: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that an allocation could get."""
        return len(self._free) + len(self._cached)

    def users(self, block: int) -> int:
        return self._users[block]

    def allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise OutOfBlocks
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        if self._users[block] == 0:
            del self._cached[block]
        self._users[block] += 1

    def release(self, blocks: Seq[int]) -> None:
        """Deepest first, so that the beginning of a prefix outlives its end."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def name(self, block: int, name: bytes) -> None:
        """Makes a fully computed block findable. The first block of a name keeps it."""
        if self.caching and name not in self._by_name and self._names[block] is None:
            self._by_name[name] = block
            self._names[block] = name

    def find(self, tokens: Seq[int], mark: Callable[[int, int], bytes] | None = None) -> tuple[list[int], list[bytes]]:
        """The blocks that hold the longest known prefix, and their names. Shares none of them yet.

        The last token is never included: its logits are what the caller wants. `mark` is what `chain` takes, for the
        places from one up to another.
        """
        blocks: list[int] = []
        names: list[bytes] = []
        parent = ROOT
        if self.caching:
            for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
                end = start + BLOCK_SIZE
                parent = chain(parent, tokens[start:end], mark(start, end) if mark else b"")
                block = self._by_name.get(parent)
                if block is None:
                    break
                blocks.append(block)
                names.append(parent)
        return blocks, names

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None
