"""Lark literals and regular expressions for the vocabulary of one model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

ANY_TEXT = r"/(.|\n)*/"


class LarkVocabulary:
    """The special tokens of a vocabulary, and texts as Lark expressions that refer to them by id.

    llguidance treats tokens as special that the tokenizer marks so, and added tokens written `<…>`. No regular
    expression and no string literal matches them.
    """

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = dict(special or {})
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first)) if longest_first else None

    def is_special(self, text: str) -> bool:
        return text in self._special

    def starts_with_special(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.match(text) is not None

    def literal(self, text: str) -> str:
        """Return a text as a Lark expression, with its special tokens by id."""
        parts, at = [], 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            if found.start() > at:
                parts.append(string_literal(text[at : found.start()]))
            parts.append(f"<[{self._special[found.group()]}]>")
            at = found.end()
        if at < len(text) or not parts:
            parts.append(string_literal(text[at:]))
        return " ".join(parts)

    def split_at_special(self, text: str) -> tuple[str, str]:
        """Return the text before the first special token, and the rest as a Lark expression, which may be empty."""
        found = self._pattern.search(text) if self._pattern else None
        if found is None:
            return text, ""
        return text[: found.start()], self.literal(text[found.start() :])


def string_literal(text: str) -> str:
    """Return a text as a Lark string, in which no special token is recognized."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # llguidance refuses this control character


def not_starting_with(pattern: str) -> str:
    """Return the body of a Lark terminal for any text that does not start with a match of the regular expression."""
    return rf"{ANY_TEXT} & ~/({pattern})(.|\n)*/"


def escape_regex(text: str) -> str:
    """Escape a text for use in a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found.group(), text).replace("\n", r"\n")


def escape_slashes(pattern: str) -> str:
    """Escape the slashes and line breaks of a regular expression for use between slashes."""
    out, escaped = [], False
    for character in pattern:
        if character == "\n":
            out.append(r"\n")
        elif character == "/" and not escaped:
            out.append(r"\/")
        else:
            out.append(character)
        escaped = character == "\\" and not escaped
    return "".join(out)
