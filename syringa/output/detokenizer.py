"""Incremental detokenizer, the first stage of the output pipeline.

A stage has `feed`, which takes new input and returns what is decided, and `flush`, which returns the rest at the end.
The other stages take and return lists of segments (`output.stages`).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

import msgspec


class TextSegment(msgspec.Struct, frozen=True, gc=False):
    """A piece of output text.

    `tokens` counts the tokens whose text starts in this segment, so that every token is counted in exactly one segment:
    a character of three tokens is one segment of three tokens, and the second part of a split token counts 0.
    """

    text: str
    tokens: int = 1
    special: bool = False  # a special token, visible to parsers but not to clients
    token: int = -1  # the id of a special token


class TokenTables(Protocol):
    """The part of a tokenizer that the detokenizer needs."""

    @property
    def bytes_table(self) -> list[bytes]: ...
    @property
    def text_table(self) -> list[str | None]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_leading_space(self) -> bool: ...


class Detokenizer:
    """Turn token ids into text segments, one per token where characters are complete.

    Bytes that are not valid UTF-8 become U+FFFD. Special tokens become segments of their own, marked `special`, or
    plain text with `show_special`. SentencePiece vocabularies write a space before the first word: with `at_start`, the
    text begins here and the space is removed; in the continuation of a prompt it is part of the text.
    """

    def __init__(self, tokenizer: TokenTables, *, show_special: bool = False, at_start: bool = False) -> None:
        self._bytes = tokenizer.bytes_table
        self._texts = tokenizer.text_table
        self._special = tokenizer.special_ids
        self._show_special = show_special
        self._strip_space = at_start and tokenizer.strips_leading_space
        self._incomplete = b""  # the first bytes of a character
        self._uncounted = 0  # tokens without any text so far

    def feed(self, tokens: Sequence[int]) -> list[TextSegment]:
        segments: list[TextSegment] = []
        texts, special = self._texts, self._special
        for token in tokens:
            if token in special:
                self._add_special(token, segments)
                continue
            text = texts[token] if 0 <= token < len(texts) else ""
            if text is None or self._incomplete:
                text = self._decode(token)
            if self._strip_space and text:
                text = text.removeprefix(" ")
                self._strip_space = False
            if text:
                segments.append(TextSegment(text, self._uncounted + 1))
                self._uncounted = 0
            else:
                self._uncounted += 1
        return segments

    def feed_text(self, tokens: Sequence[int]) -> str:
        """Like `feed`, but return only the visible text."""
        if len(tokens) == 1 and not self._incomplete and not self._strip_space:
            token = tokens[0]
            if token not in self._special and 0 <= token < len(self._texts):
                text = self._texts[token]
                if text is not None:
                    return text
        return plain_text(self.feed(tokens))

    def flush(self) -> list[TextSegment]:
        """Return an incomplete character as U+FFFD, and tokens without any text."""
        text = self._incomplete.decode("utf-8", "replace")
        uncounted = self._uncounted
        self._incomplete, self._uncounted = b"", 0
        return [TextSegment(text, uncounted)] if text or uncounted else []

    def _decode(self, token: int) -> str:
        table = self._bytes
        data = self._incomplete + (table[token] if 0 <= token < len(table) else b"")
        text, used = utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        return text

    def _add_special(self, token: int, segments: list[TextSegment]) -> None:
        segments += self.flush()
        if self._show_special:
            self._strip_space = False
        text = self._bytes[token].decode("utf-8", "replace")
        segments.append(TextSegment(text, 1, not self._show_special, token))


def plain_text(segments: Sequence[TextSegment]) -> str:
    """Return the visible text of some segments."""
    return "".join([segment.text for segment in segments if not segment.special])
