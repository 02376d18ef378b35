"""Names for what has none yet: drawn at random, so that no two meet and none can be guessed.

Every request needs several. The system's randomness is taken in larger portions: asking for each name apart would cost
more than all that is done with it.
"""

from __future__ import annotations

import os

_PORTION = 4096

_drawn = b""
_used = 0


def random_bytes(count: int) -> bytes:
    """As good as `os.urandom`, for up to a few kilobytes."""
    global _drawn, _used
    if _used + count > len(_drawn):
        _drawn, _used = os.urandom(max(_PORTION, count)), 0
    _used += count
    return _drawn[_used - count : _used]


def random_id(prefix: str = "", count: int = 16) -> str:
    """`prefix` and 32 hexadecimal digits, or two for each of `count` bytes."""
    return prefix + random_bytes(count).hex()


def random_number(bits: int) -> int:
    """From 0 to below 2 ** `bits`."""
    return int.from_bytes(random_bytes((bits + 7) // 8)) >> (-bits % 8)


def _forget() -> None:
    """A copy of this process would draw the same."""
    global _drawn, _used
    _drawn, _used = b"", 0


os.register_at_fork(after_in_child=_forget)
