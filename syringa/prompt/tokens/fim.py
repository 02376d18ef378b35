"""Fill-in-the-middle (FIM): the special tokens of model families, and prompts from a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class FimTokenizer(Protocol):
    """The part of a tokenizer that fill-in-the-middle needs."""

    strips_leading_space: bool

    def token_id(self, text: str) -> int | None: ...

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]: ...


class _FimMarkers(msgspec.Struct, frozen=True):
    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()  # further end tokens, besides the markers and the model's own
    suffix_first: bool = False


_FORMATS: tuple[_FimMarkers, ...] = (
    # Qwen-Coder, and CodeGemma with its own separator
    _FimMarkers(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder 1 and 2, Granite
    _FimMarkers(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>"),
    ),
    # SantaCoder
    _FimMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # CodeLlama
    _FimMarkers("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # DeepSeek-Coder; the hole is where the middle was removed
    _FimMarkers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>", "<｜end▁of▁sentence｜>")),
    # Codestral, whose prefix comes last
    _FimMarkers("[PREFIX]", "[SUFFIX]", None, ("[MIDDLE]",), suffix_first=True),
)
_ANCHOR = "☺"


class FimPrompt(msgspec.Struct, frozen=True):
    """The tokens of a prompt; the first `before` and the last `after` do not belong to the prefix."""

    tokens: list[int]
    before: int
    after: int


class FimFormat:
    """The fill-in-the-middle format of a model. `end_tokens` end the middle, in addition to the model's own."""

    def __init__(self, tokenizer: FimTokenizer, markers: _FimMarkers, ids: dict[str, int]) -> None:
        self.end_tokens = frozenset(ids.values()) | _known_tokens(tokenizer, markers.ends)
        self._tokenizer = tokenizer
        self._markers = markers
        self._ids = ids

    def build(self, prefix: Sequence[int], suffix: Sequence[int]) -> FimPrompt:
        """Return the prompt. `prefix` may start with the tokens of an empty text; `suffix` is from `encode_suffix`."""
        start = self._tokenizer.encode("", add_special=True)
        prefix_tokens = list(prefix[len(start) :] if list(prefix[: len(start)]) == start else prefix)
        markers, ids = self._markers, self._ids
        suffix_part = [ids[markers.suffix], *suffix]
        if markers.suffix_first:
            before, after = [*start, *suffix_part, ids[markers.prefix]], []
        else:
            before, after = [*start, ids[markers.prefix]], suffix_part
        if markers.middle is not None:
            after = [*after, ids[markers.middle]]
        return FimPrompt(before + prefix_tokens + after, len(before), len(after))

    def encode_suffix(self, text: str) -> list[int]:
        """Return the tokens of a suffix, without the space that SentencePiece writes before a text."""
        encode = self._tokenizer.encode
        if self._tokenizer.strips_leading_space:
            anchor = encode(_ANCHOR, add_special=False)
            tokens = encode(_ANCHOR + text, add_special=False)
            if tokens[: len(anchor)] == anchor:
                return tokens[len(anchor) :]
        return encode(text, add_special=False)


def find_fim_format(tokenizer: FimTokenizer) -> FimFormat | None:
    """Return the format of the model with this tokenizer; None if it has no tokens for it."""
    for markers in _FORMATS:
        names = [name for name in (markers.prefix, markers.suffix, markers.middle) if name is not None]
        ids = {name: id_ for name in names if (id_ := tokenizer.token_id(name)) is not None}
        if len(ids) == len(names):
            return FimFormat(tokenizer, markers, ids)
    return None


def _known_tokens(tokenizer: FimTokenizer, names: Sequence[str]) -> frozenset[int]:
    ids = (tokenizer.token_id(name) for name in names)
    return frozenset(id_ for id_ in ids if id_ is not None)
