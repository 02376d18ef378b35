"""Encoder for stream chunks that differ only in their text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from syringa.ids import random_id

_encode = msgspec.json.Encoder().encode

_PLACEHOLDER = random_id()  # random, so that it does not occur elsewhere in a chunk
_QUOTED = _encode(_PLACEHOLDER)


class TextChunkEncoder:
    """Encodes the chunk that `make(choice, text)` returns. Everything around the text is encoded once per choice."""

    def __init__(self, make: Callable[[int, str], msgspec.Struct]) -> None:
        self._make = make
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def __call__(self, choice: int, text: str) -> msgspec.Raw:
        template = self._templates.get(choice)
        if template is None:
            before, after = _encode(self._make(choice, _PLACEHOLDER)).split(_QUOTED)
            template = self._templates[choice] = before, after
        return msgspec.Raw(template[0] + _encode(text) + template[1])
