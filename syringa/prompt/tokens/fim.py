"""Fill in the middle: which tokens a model has for it, and the prompt that they make of a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class FimTokenizer(Protocol):
    """What is needed of a tokenizer."""

    strips_leading_space: bool

    def token_id(self, text: str) -> int | None: ...

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]: ...


class _Family(msgspec.Struct, frozen=True):
    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()  # end the middle, where the model has them, beside the marks and the model's own ends
    suffix_first: bool = False


_FAMILIES = (
    # Qwen-Coder, and CodeGemma with its own separator
    _Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder 1 and 2, Granite
    _Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>"),
    ),
    # SantaCoder
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # CodeLlama
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # DeepSeek-Coder; the hole stands where the middle was cut out
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>", "<｜end▁of▁sentence｜>")),
    # Codestral, whose middle follows the prefix
    _Family("[PREFIX]", "[SUFFIX]", None, ("[MIDDLE]",), suffix_first=True),
)
_ANCHOR = "☺"


class FimPrompt(msgspec.Struct, frozen=True):
    """A prompt's tokens, `before` and `after` of which do not belong to the prefix."""

    tokens: list[int]
    before: int
    after: int


class FimFormat:
    """A model's way to fill in. `ends` are tokens that end the middle, beside the model's own."""

    def __init__(self, vocabulary: FimTokenizer, family: _Family, marks: dict[str, int]) -> None:
        self.ends = frozenset(marks.values()) | _present(vocabulary, family.ends)
        self._vocabulary = vocabulary
        self._family = family
        self._marks = marks

    def build(self, prefix: Sequence[int], suffix: Sequence[int]) -> FimPrompt:
        """The prompt. `prefix` may have what the model puts before every text, `suffix` is from `encode_suffix`."""
        start = self._vocabulary.encode("", add_special=True)
        own = list(prefix[len(start) :] if list(prefix[: len(start)]) == start else prefix)
        family, marks = self._family, self._marks
        behind = [marks[family.suffix], *suffix]
        opening = [marks[family.prefix]]
        if family.suffix_first:
            before, after = start + behind + opening, []
        else:
            before, after = start + opening, behind
        if family.middle is not None:
            after = [*after, marks[family.middle]]
        return FimPrompt(before + own + after, len(before), len(after))

    def encode_suffix(self, text: str) -> list[int]:
        """SentencePiece writes a space before a text; a suffix goes on within one, and has none."""
        encode = self._vocabulary.encode
        if self._vocabulary.strips_leading_space:
            anchor = encode(_ANCHOR, add_special=False)
            tokens = encode(_ANCHOR + text, add_special=False)
            if tokens[: len(anchor)] == anchor:
                return tokens[len(anchor) :]
        return encode(text, add_special=False)


def find_fim_format(vocabulary: FimTokenizer) -> FimFormat | None:
    """How the model that has this vocabulary fills in; None if it has no tokens for it."""
    for family in _FAMILIES:
        names = [name for name in (family.prefix, family.suffix, family.middle) if name is not None]
        marks = {name: vocabulary.token_id(name) for name in names}
        whole = {name: id_ for name, id_ in marks.items() if id_ is not None}
        if len(whole) == len(names):
            return FimFormat(vocabulary, family, whole)
    return None


def _present(vocabulary: FimTokenizer, names: Sequence[str]) -> frozenset[int]:
    ids = (vocabulary.token_id(name) for name in names)
    return frozenset(id_ for id_ in ids if id_ is not None)
