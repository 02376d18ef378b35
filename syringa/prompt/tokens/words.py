"""Texts to token ids by way of their words, most of which were seen before.

A byte-pair vocabulary cuts a text into words by a regular expression, and each word into tokens by itself. The library
does all of that again for every text, a microsecond a token; looking words up takes a fraction of it. This is for ASCII
text alone, where the classes of characters that such expressions name are plain: whatever else there is, in a text or
in a tokenizer, is left to the library.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import tokenizers

MOST_CHARACTERS = 20_000  # of a text: beyond, the library does it without holding others up
MOST_KNOWN = 20_000
LONGEST_KNOWN = 32  # characters
# Normal forms, which all ASCII text has.
_HARMLESS = {"NFC", "NFD", "NFKC", "NFKD"}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PROPERTY = re.compile(r"\\p\{(\w+)\}")
_PROBE = "It's 2024: a probe,\tof (some) kinds of  words...\n\n  x1y22 DON'T stop. \r\n"


class Words:
    def __init__(self, tokenizer: tokenizers.Tokenizer, cuts: Iterable[str]) -> None:
        """`cuts`: regular expressions, of which each cuts what the one before has left in one piece."""
        self._tokenizer = tokenizer
        self._cuts = [_Cut(each) for each in cuts]
        self._known: dict[str, list[int]] = {}
        added = tokenizer.get_added_tokens_decoder()
        self._marks = {token.content: id_ for id_, token in added.items()}
        self._odd = {each.content for each in added.values() if each.lstrip or each.rstrip or each.single_word}
        longest_first = sorted(filter(None, self._marks), key=len, reverse=True)
        self._mark = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> Words | None:
        """None: this tokenizer cuts texts in another way."""
        cuts = _cuts(tokenizer)
        if cuts is None:
            return None
        try:
            words = cls(tokenizer, cuts)
        except re.error:
            return None
        expected = tokenizer.encode_batch_fast([_PROBE], add_special_tokens=False)[0].ids
        return words if words.encode(_PROBE) == expected else None

    def encode(self, text: str, *, marks: bool = True) -> list[int] | None:
        """None: this text is for the library. Without `marks`, so is one that has what would be read as one."""
        if len(text) > MOST_CHARACTERS or not text.isascii():
            return None
        if self._mark is None or self._mark.search(text) is None:
            return self._encode(text)
        if not marks:
            return None
        ids: list[int] = []
        for place, part in enumerate(self._mark.split(text)):
            if place % 2 == 0:
                ids += self._encode(part)
            elif part in self._odd:
                return None
            else:
                ids.append(self._marks[part])
        return ids

    def _encode(self, text: str) -> list[int]:
        words = [text] if text else []
        for cut in self._cuts:
            words = cut.pieces(words)
        known = self._known
        ids: list[int] = []
        try:
            for word in words:
                ids += known[word]
        except KeyError:
            known = self._learn(words)
            ids = [id_ for word in words for id_ in known[word]]
        return ids

    def _learn(self, words: list[str]) -> dict[str, list[int]]:
        """All of these words, and what they become; the short ones are remembered."""
        found = {word: ids for word in words if (ids := self._known.get(word)) is not None}
        new = [word for word in dict.fromkeys(words) if word not in found]
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        found |= {word: encoding.ids for word, encoding in zip(new, encodings, strict=True)}
        if len(self._known) > MOST_KNOWN:
            self._known = {}
        self._known.update((word, found[word]) for word in new if len(word) <= LONGEST_KNOWN)
        return found


class _Cut:
    """Raises `re.error` for what is no regular expression here."""

    def __init__(self, expression: str) -> None:
        self._word = re.compile(_for_ascii(expression), re.ASCII)
        self._between = re.compile(f"({self._word.pattern})", re.ASCII)
        if self._word.groups or self._word.match(""):
            raise re.error("words must not be empty, nor have parts that are told apart")

    def pieces(self, texts: list[str]) -> list[str]:
        """What matches, and what is between."""
        found: list[str] = []
        for text in texts:
            words = self._word.findall(text)
            if sum(map(len, words)) != len(text):
                words = [each for each in self._between.split(text) if each]
            found += words
        return found


def _cuts(tokenizer: tokenizers.Tokenizer) -> list[str] | None:
    if not isinstance(tokenizer.model, tokenizers.models.BPE) or tokenizer.model.dropout:
        return None
    for step in _steps(tokenizer.normalizer, "normalizers"):
        if step.get("type") not in _HARMLESS:
            return None
    cuts: list[str] = []
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    for place, step in enumerate(steps):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex} if place == len(steps) - 1:
                return [*cuts, _GPT2] if regex else cuts or None
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                cuts.append(pattern)
            case {"type": "Digits", "individual_digits": bool(single)}:
                cuts.append(r"\p{N}" if single else r"\p{N}+")
            case _:
                return None
    return None


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state[name] if state.get("type") == "Sequence" else [state]
    return steps


def _for_ascii(expression: str) -> str:
    """The expression with the properties that it names written out. Raises `re.error` for what Python has not got."""
    if "&&" in expression or r"\P" in expression or r"\h" in expression:
        raise re.error("classes of a kind that Python does not have")
    parts: list[str] = []
    inside = False
    at = 0
    while at < len(expression):
        if found := _PROPERTY.match(expression, at):
            members = _members(found[1])
            if not members and not inside:
                raise re.error("a class without members")
            parts.append(members if inside else f"[{members}]")
            at = found.end()
            continue
        step = 2 if expression[at] == "\\" else 1
        if step == 1 and expression[at] in "[]":
            if inside == (expression[at] == "["):
                raise re.error("a class in a class")
            inside = not inside
        parts.append(expression[at : at + step])
        at += step
    return "".join(parts)


def _members(name: str) -> str:
    """The ASCII characters of a category, as a class has them."""
    return "".join(re.escape(chr(each)) for each in range(128) if unicodedata.category(chr(each)).startswith(name))
