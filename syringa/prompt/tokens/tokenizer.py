"""Text to token ids and back, with the exact bytes of every token."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import tokenizers

from syringa.modelfiles import ModelDescription, ModelFiles, describe, load_tokenizer
from syringa.prompt.grammar.lark import LarkVocabulary

# One text at a time is encoded: handing it to another thread, as the library would, makes that slower, and more costly.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = re.compile("<.*>", re.DOTALL)
_KEPT_SEARCHES = 1000


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, description: ModelDescription) -> None:
        self._tokenizer = tokenizer
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._searches: dict[str, frozenset[int]] = {}
        self._layout = _Layout(tokenizer)
        self._prefix = [description.bos_token] if description.add_bos and description.bos_token is not None else []
        self.strips_leading_space = self._layout.strips_leading_space

    @classmethod
    def load(cls, files: ModelFiles, description: ModelDescription | None = None) -> Tokenizer:
        tokenizer = cls(load_tokenizer(files), description or describe(files))
        tokenizer.text_table  # noqa: B018  it takes a moment, which no request should wait for
        return tokenizer

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text.

        `add_special` puts the model's first token before it, where the model has one; a rendered chat template has it
        already. `parse_special` off reads `<|im_end|>` as nine characters, which is what untrusted text is.
        """
        tokenizer = self._tokenizer if parse_special else self._without_special()
        # The batch call leaves out offsets, which for a long text cost more than the ids.
        ids: list[int] = tokenizer.encode_batch_fast([_encodable(text)], add_special_tokens=False)[0].ids
        return self._prefix + ids if add_special else ids

    @functools.cached_property
    def longest_token(self) -> int:
        """In bytes. A text of more than n times as many characters has more than n tokens."""
        return max(map(len, self.bytes_table), default=1)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD."""
        table, special = self.bytes_table, self.special_ids
        parts: list[str] = []
        run: list[bytes] = []
        for id_ in ids:
            if id_ not in special:
                run.append(table[id_] if 0 <= id_ < len(table) else b"")
                continue
            # A character does not continue across a special token, in the stream as here.
            parts.append(b"".join(run).decode("utf-8", "replace"))
            run.clear()
            if not skip_special:
                parts.append(table[id_].decode("utf-8", "replace"))
        parts.append(b"".join(run).decode("utf-8", "replace"))
        text = "".join(parts)
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, id_: int) -> bytes:
        """What a token stands for; empty for an id that the model has and the tokenizer has not."""
        table = self.bytes_table
        return table[id_] if 0 <= id_ < len(table) else b""

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is written so in the vocabulary."""
        id_: int | None = self._tokenizer.token_to_id(text)
        return id_

    def tokens_containing(self, text: str) -> frozenset[int]:
        """The tokens whose text contains `text`; where there are none, the last token that `text` is written with."""
        found = self._searches.get(text)
        if found is None:
            needle = text.encode("utf-8", "surrogatepass")
            special = self.special_ids
            found = frozenset(
                id_ for id_, value in enumerate(self.bytes_table) if needle in value and id_ not in special
            )
            if not found:
                found = frozenset(self.encode(text, add_special=False, parse_special=False)[-1:])
            if len(self._searches) >= _KEPT_SEARCHES:  # clients choose the texts
                self._searches.clear()
            self._searches[text] = found
        return found

    def to_json(self) -> str:
        """The tokenizer in the form of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(vocab.values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that mark structure; users do not see them."""
        return frozenset(id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """The texts of the tokens that were added to the vocabulary, special or not."""
        return frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def lark_vocabulary(self) -> LarkVocabulary:
        """How grammars write texts in this vocabulary."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return LarkVocabulary(
            {token.content: id_ for id_, token in added if token.special or _MARK.fullmatch(token.content)}
        )

    @cached_property
    def bytes_table(self) -> list[bytes]:
        """The bytes of every token, by its id."""
        table = [b""] * self.vocab_size
        to_bytes = self._layout.to_bytes
        for token, id_ in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[id_] = to_bytes(token)
        for id_, added in self._tokenizer.get_added_tokens_decoder().items():
            table[id_] = added.content.encode()  # written as it is read, in every kind of vocabulary
        return table

    @cached_property
    def text_table(self) -> list[str | None]:
        """The text of every token that is whole characters, and nothing but text; None where it is not."""
        texts: list[str | None] = []
        for value in self.bytes_table:
            try:
                texts.append(value.decode())
            except UnicodeDecodeError:
                texts.append(None)
        for id_ in self.special_ids:
            texts[id_] = None
        return texts

    def _without_special(self) -> tokenizers.Tokenizer:
        # The switch is a state of the tokenizers object, which other threads use meanwhile: so there are two of them.
        with self._lock:
            if self._plain is None:
                self._plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
                self._plain.encode_special_tokens = True
            return self._plain


class _Layout:
    """How a vocabulary writes bytes and spaces, read from the tokenizer's own decoder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A decoder's state is its part of the tokenizer.json; the whole would be megabytes.
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
            except UnicodeEncodeError:  # a character that stands for no byte: the token is written as it is
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self.escaped_space:
            token = token.replace(self.space, " ")
        return token.encode()


def _byte_characters() -> dict[int, int]:
    """Byte-level vocabularies write a printable Latin-1 byte as itself and the n-th other byte as U+0100 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {0x100 + n: byte for n, byte in enumerate(others)}
    # A character that is not in the alphabet must not pass for a byte.
    table.update(dict.fromkeys(others, 0xFFFF))
    return table


_BYTE_OF_CHARACTER = _byte_characters()


def _encodable(text: str) -> str:
    """JSON can carry half of a surrogate pair, which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
