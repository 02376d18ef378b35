"""Random ids that are unique and cannot be guessed.

Every request needs several. Random bytes are read from the system in blocks, because one system call for each id costs
more than everything else about it.
"""

from __future__ import annotations

import os

_BLOCK_SIZE = 4096

_buffer = b""
_position = 0


def random_bytes(count: int) -> bytes:
    """Return random bytes of the same quality as `os.urandom`, for up to a few kilobytes."""
    global _buffer, _position
    if _position + count > len(_buffer):
        _buffer, _position = os.urandom(max(_BLOCK_SIZE, count)), 0
    _position += count
    return _buffer[_position - count : _position]


def random_id(prefix: str = "", count: int = 16) -> str:
    """Return `prefix` followed by two hexadecimal digits for each of `count` random bytes."""
    return prefix + random_bytes(count).hex()


def random_number(bits: int) -> int:
    """Return a number from 0 to below 2 ** `bits`."""
    return int.from_bytes(random_bytes((bits + 7) // 8)) >> (-bits % 8)


def _reset() -> None:
    """Drop the buffer, which a forked process would share with its parent."""
    global _buffer, _position
    _buffer, _position = b"", 0


os.register_at_fork(after_in_child=_reset)
