"""The tokenizer of an embedding model or a cross-encoder: texts and pairs with the special tokens around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tokenizers

from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, ModelFiles, load_tokenizer
from syringa.prompt.tokens.control_tokens import replace_surrogates
from syringa.prompt.tokens.tokenizer import Tokenizer

_PROBES = "a", "b"  # texts by which the special tokens are found


class EncoderTokenizer(Tokenizer):
    """A tokenizer whose post-processor puts special tokens around texts, such as `[CLS] … [SEP]`. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, description: ModelDescription, *, lower_case: bool) -> None:
        """`lower_case`: texts are lowercased first, whatever the tokenizer does. Raises `ModelError`."""
        super().__init__(tokenizer, description)
        self._lower_case = lower_case
        first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in _PROBES)
        self._single = _around(tokenizer.encode(_PROBES[0]).ids, first)
        self._pair = _around(tokenizer.encode(*_PROBES).ids, first, second)

    @classmethod
    def load_encoder(cls, files: ModelFiles, description: ModelDescription, *, lower_case: bool) -> EncoderTokenizer:
        """Return the tokenizer of a model's files. Raises `ModelError`."""
        tokenizer = cls(load_tokenizer(files), description, lower_case=lower_case)
        tokenizer.control_tokens  # noqa: B018  computed now, so that no request waits for it
        return tokenizer

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the tokens of a text, as the model gets it: special tokens in it are never parsed."""
        (ids,) = self.encode_texts([text])
        return self.wrap(ids) if add_special else ids

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of client texts, without special tokens around them.

        Texts are stripped and lowercased as the model was trained. Special tokens in them are read as characters:
        otherwise a document could say where it ends.
        """
        prepared = [replace_surrogates(text.strip()) for text in texts]
        if self._lower_case:
            prepared = [text.lower() for text in prepared]
        encodings = self._tokenizer.encode_batch_fast(prepared, add_special_tokens=False)
        return [
            self.control_tokens.encode_plain(text) if self.control_tokens.may_occur_in([text]) else encoding.ids
            for text, encoding in zip(prepared, encodings, strict=True)
        ]

    def wrap(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a text with the special tokens around it."""
        before, after = self._single
        return [*before, *tokens, *after]

    def wrap_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Return the tokens of two texts with the special tokens around them, and the index of the second text."""
        before, between, after = self._pair
        start = [*before, *first, *between]
        return [*start, *second, *after], len(start)

    @property
    def special_tokens_single(self) -> int:
        """The number of special tokens around a text."""
        return sum(map(len, self._single))

    @property
    def special_tokens_pair(self) -> int:
        """The number of special tokens around and between two texts."""
        return sum(map(len, self._pair))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text


def _around(whole: list[int], *parts: list[int]) -> list[list[int]]:
    """Return the tokens before, between and after `parts`, which `whole` has in this order."""
    found, at = [], 0
    for part in parts:
        starts = range(at, len(whole) - len(part) + 1)
        start = next((each for each in starts if whole[each : each + len(part)] == part), None)
        if start is None:
            raise ModelError("the special tokens of the tokenizer are not known: its post-processor changes texts")
        found.append(whole[at:start])
        at = start + len(part)
    return [*found, whole[at:]]
