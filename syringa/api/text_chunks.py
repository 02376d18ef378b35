"""Chunks that differ in nothing but their text: the rest is written once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from syringa.ids import fresh_id

_encode = msgspec.json.Encoder().encode

_MARK = fresh_id()  # which nobody knows, so that it is nowhere else in a chunk
_QUOTED = _encode(_MARK)


class TextChunks:
    """Writes the chunk that `make` would make of a choice and a text."""

    def __init__(self, make: Callable[[int, str], msgspec.Struct]) -> None:
        self._make = make
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def __call__(self, choice: int, text: str) -> msgspec.Raw:
        before, after = self.around(choice)
        return msgspec.Raw(before + _encode(text) + after)

    def around(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before the text, and after it."""
        found = self._around.get(choice)
        if found is None:
            before, after = _encode(self._make(choice, _MARK)).split(_QUOTED)
            found = self._around[choice] = before, after
        return found
