"""Literals of a Lark grammar, for one vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

ANY = r"/(.|\n)*/"


class Spelling:
    """Knows the tokens that llguidance takes for special: those that the tokenizer marks so, and added ones that are
    written `<…>`. No regular expression and no string literal matches one; they go by id."""

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = dict(special or {})
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._cut = re.compile("|".join(longest_first)) if longest_first else None

    def is_special(self, text: str) -> bool:
        return text in self._special

    def begins_special(self, text: str) -> bool:
        return self._cut is not None and self._cut.match(text) is not None

    def token(self, text: str) -> str:
        """One special token."""
        return f"<[{self._special[text]}]>"

    def literal(self, text: str) -> str:
        """A text as a Lark expression, with the special tokens in it by their ids."""
        parts, at = [], 0
        for found in self._cut.finditer(text) if self._cut else ():
            if found.start() > at:
                parts.append(json.dumps(text[at : found.start()], ensure_ascii=False))
            parts.append(self.token(found.group()))
            at = found.end()
        if at < len(text) or not parts:
            parts.append(json.dumps(text[at:], ensure_ascii=False))
        return " ".join(parts)

    def cut(self, text: str) -> tuple[str, str]:
        """What comes before the first special token in a text, and the rest as a Lark expression, if there is any."""
        found = self._cut.search(text) if self._cut else None
        if found is None:
            return text, ""
        return text[: found.start()], self.literal(text[found.start() :])


def not_starting(pattern: str) -> str:
    """The body of a Lark terminal: any text that does not begin with what a regular expression matches."""
    return rf"{ANY} & ~/({pattern})(.|\n)*/"


def quoted(text: str) -> str:
    """A text inside a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found.group(), text).replace("\n", r"\n")
