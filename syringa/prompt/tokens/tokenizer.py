"""Tokenizer: text to token ids and back, with the exact bytes of every token."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import tokenizers

from syringa.modelfiles import ModelDescription, ModelFiles, describe, load_tokenizer
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.tokens.control_tokens import ControlTokens, replace_surrogates

# Texts are encoded one at a time, and the library's thread pool only adds overhead to that.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANGLE_BRACKETS = re.compile("<.*>", re.DOTALL)


class Tokenizer:
    """The tokenizer of a model. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, description: ModelDescription) -> None:
        self._tokenizer = tokenizer
        self._encoding = _VocabularyEncoding(tokenizer)
        self._prefix = [description.bos_token] if description.add_bos and description.bos_token is not None else []
        self.strips_leading_space = self._encoding.strips_leading_space

    @classmethod
    def load(cls, files: ModelFiles, description: ModelDescription | None = None) -> Tokenizer:
        tokenizer = cls(load_tokenizer(files), description or describe(files))
        # Computed now, so that no request waits for it.
        tokenizer.text_table  # noqa: B018
        tokenizer.control_tokens  # noqa: B018
        return tokenizer

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        `add_special` prepends the BOS token, if the model has one; a rendered chat template already contains it.
        Without `parse_special`, `<|im_end|>` is read as characters, as untrusted text must be.
        """
        text = replace_surrogates(text)
        if parse_special:
            # The batch call skips offsets, which cost more than the ids for a long text.
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self.control_tokens.encode_plain(text)
        return self._prefix + ids if add_special else ids

    @functools.cached_property
    def longest_token(self) -> int:
        """The length of the longest token in bytes: a text of over n times as many characters has over n tokens."""
        return max(map(len, self.bytes_table), default=1)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Invalid UTF-8 becomes U+FFFD."""
        table, special = self.bytes_table, self.special_ids
        parts: list[str] = []
        data: list[bytes] = []
        for id_ in ids:
            if id_ not in special:
                data.append(table[id_] if 0 <= id_ < len(table) else b"")
                continue
            # A special token ends an incomplete character, as in the streaming detokenizer.
            parts.append(b"".join(data).decode("utf-8", "replace"))
            data.clear()
            if not skip_special:
                parts.append(table[id_].decode("utf-8", "replace"))
        parts.append(b"".join(data).decode("utf-8", "replace"))
        text = "".join(parts)
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes of a token; empty for an id that only the model has."""
        table = self.bytes_table
        return table[id_] if 0 <= id_ < len(table) else b""

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text in the vocabulary, or None."""
        id_: int | None = self._tokenizer.token_to_id(text)
        return id_

    def tokens_containing(self, text: str) -> frozenset[int]:
        """Return the tokens whose text contains `text`, which is not empty; if none does, the last of its encoding.

        Not cached by text: the time of a search would tell a client which texts others have sent.
        """
        needle = text.encode("utf-8", "surrogatepass")
        tokens, starts = self._search_buffer
        found = []
        at = tokens.find(needle)
        while at >= 0:
            found.append(bisect_right(starts, at) - 1)
            at = tokens.find(needle, starts[found[-1] + 1])
        return frozenset(found or self.encode(text, add_special=False, parse_special=False)[-1:])

    @cached_property
    def _search_buffer(self) -> tuple[bytes, array[int]]:
        """The bytes of all tokens but special ones, separated by a byte that no text has, and the start of each."""
        special = self.special_ids
        values = [b"" if id_ in special else value for id_, value in enumerate(self.bytes_table)]
        starts = array("L", itertools.accumulate((len(value) + 1 for value in values), initial=0))
        return b"\xff".join([*values, b""]), starts

    def to_json(self) -> str:
        """Return the tokenizer as a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(vocab.values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which clients do not see."""
        return frozenset(id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """The texts of all added tokens, special or not."""
        return frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens of the vocabulary, for prompts with client text."""
        return ControlTokens(self._tokenizer, self.vocab_size)

    @cached_property
    def lark_vocabulary(self) -> LarkVocabulary:
        """The special tokens of the vocabulary, for Lark grammars."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return LarkVocabulary(
            {token.content: id_ for id_, token in added if token.special or _ANGLE_BRACKETS.fullmatch(token.content)}
        )

    @cached_property
    def bytes_table(self) -> list[bytes]:
        """The bytes of each token, by id."""
        table = [b""] * self.vocab_size
        to_bytes = self._encoding.to_bytes
        for token, id_ in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[id_] = to_bytes(token)
        for id_, added in self._tokenizer.get_added_tokens_decoder().items():
            table[id_] = added.content.encode()  # added tokens are stored as plain text
        return table

    @cached_property
    def text_table(self) -> list[str | None]:
        """The text of each token that consists of complete characters; None for other and for special tokens."""
        texts: list[str | None] = []
        for value in self.bytes_table:
            try:
                texts.append(value.decode())
            except UnicodeDecodeError:
                texts.append(None)
        for id_ in self.special_ids:
            texts[id_] = None
        return texts


class _VocabularyEncoding:
    """How a vocabulary encodes bytes and spaces, according to the tokenizer's decoder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # The state of a decoder is its part of the tokenizer.json, which is megabytes as a whole.
        decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        kinds = {step.get("type") for step in steps}
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds or getattr(tokenizer.model, "byte_fallback", False)
        metaspace = next((step for step in steps if step.get("type") == "Metaspace"), {})
        self.space = metaspace.get("replacement", "▁")
        self.escaped_space = bool(metaspace) or any(
            step.get("type") == "Replace" and step.get("content") == " " for step in steps
        )
        self.strips_leading_space = metaspace.get("prepend_scheme", "never") != "never" or any(
            step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0 for step in steps
        )

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
            except UnicodeEncodeError:  # a character outside the byte alphabet: the token is plain text
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self.escaped_space:
            token = token.replace(self.space, " ")
        return token.encode()


def _byte_characters() -> dict[int, int]:
    """Return the byte alphabet: printable Latin-1 bytes are themselves, the n-th other byte is U+0100 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {0x100 + n: byte for n, byte in enumerate(others)}
    # Characters outside the alphabet must not be read as bytes.
    table.update(dict.fromkeys(others, 0xFFFF))
    return table


_BYTE_OF_CHARACTER = _byte_characters()
