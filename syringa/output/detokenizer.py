"""Token ids to text, as they come.

A stage of the output pipeline has `feed`, which takes what is new and returns what is decided, and `flush`, which
returns the rest at the end. This is the first stage; all others take and return lists of `Piece`.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

import msgspec


class TextSegment(msgspec.Struct, frozen=True, gc=False):
    """A stretch of output.

    `tokens` counts the tokens whose first text is in this piece, so that over all pieces every token is counted once.
    A character that took three tokens is one piece of three tokens; what is left of a token after a cut counts 0.
    """

    text: str
    tokens: int = 1
    special: bool = False  # a marker, for parsers to see and not for users
    token: int = -1  # the id of a special token


class TokenTables(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def bytes_table(self) -> list[bytes]: ...
    @property
    def text_table(self) -> list[str | None]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_leading_space(self) -> bool: ...


class Detokenizer:
    """Emits text as soon as its characters are complete, one piece per token where it can.

    Bytes that prove to be no UTF-8 become U+FFFD. Special tokens come as pieces of their own, marked `special`;
    `show_special` makes them plain text. SentencePiece vocabularies write a space before the first word: `at_start`
    says that the text begins here, and removes it; after a prompt, which the text continues, it belongs to the text.
    """

    def __init__(self, vocabulary: TokenTables, *, show_special: bool = False, at_start: bool = False) -> None:
        self._bytes = vocabulary.bytes_table
        self._texts = vocabulary.text_table
        self._special = vocabulary.special_ids
        self._show_special = show_special
        self._strip = at_start and vocabulary.strips_leading_space
        self._rest = b""  # the beginning of a character
        self._waiting = 0  # tokens that have not shown any text yet

    def feed(self, tokens: Sequence[int]) -> list[TextSegment]:
        pieces: list[TextSegment] = []
        texts, special = self._texts, self._special
        for token in tokens:
            if token in special:
                self._mark(token, pieces)
                continue
            text = texts[token] if 0 <= token < len(texts) else ""
            if text is None or self._rest:
                text = self._complete(token)
            if self._strip and text:
                text = text.removeprefix(" ")
                self._strip = False
            if text:
                pieces.append(TextSegment(text, self._waiting + 1))
                self._waiting = 0
            else:
                self._waiting += 1
        return pieces

    def flush(self) -> list[TextSegment]:
        """What is left: the beginning of a character that never came, and tokens without any text."""
        text = self._rest.decode("utf-8", "replace")
        waiting = self._waiting
        self._rest, self._waiting = b"", 0
        return [TextSegment(text, waiting)] if text or waiting else []

    def _complete(self, token: int) -> str:
        table = self._bytes
        data = self._rest + (table[token] if 0 <= token < len(table) else b"")
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def _mark(self, token: int, pieces: list[TextSegment]) -> None:
        pieces += self.flush()
        if self._show_special:
            self._strip = False
        text = self._bytes[token].decode("utf-8", "replace")
        pieces.append(TextSegment(text, 1, not self._show_special, token))


def plain_text(pieces: Sequence[TextSegment]) -> str:
    """What a user sees of some pieces."""
    return "".join(piece.text for piece in pieces if not piece.special)
