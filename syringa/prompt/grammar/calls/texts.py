"""Strings that are written as they are, without quotes and escapes: what a schema says of them, as Lark terminals."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from syringa.prompt.grammar.calls.flat import Flat
from syringa.prompt.grammar.calls.formats import REGEXES
from syringa.prompt.grammar.lark import ANY, quoted

# In JSON schemas these mean ASCII alone; in Lark they would not.
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_CLASSES |= {"s": r"[ \t\n\r\f\v]", "S": r"[^ \t\n\r\f\v]"}


def text_terminal(
    flat: Flat, without: Sequence[str] = (), unlike: Sequence[str] = (), not_first: str = ""
) -> str | None:
    """The body of a terminal: the texts that fit, with none of some marks in them, not like some regular expressions,
    and with none of some characters for the first that is not blank; None if there is no such text."""
    parts = []
    if "values" in flat:
        texts = [each for each in flat["values"] if isinstance(each, str)]
        texts = [each for each in texts if not any(mark in each for mark in without)]
        if not texts:
            return None
        parts.append("(" + " | ".join(json.dumps(each, ensure_ascii=False) for each in texts) + ")")
    if "minLength" in flat or "maxLength" in flat:
        parts.append(_length(int(flat.get("minLength", 0)), flat.get("maxLength")))
    parts += [f"/{unanchored(pattern)}/" for pattern in flat.get("patterns", ())]
    parts += [f"/{REGEXES[each]}/" for each in flat.get("formats", ()) if each in REGEXES]
    if without and "values" not in flat:
        parts.append(f"/{free_of(tuple(without))}/")
    parts += [f"~/{each}/" for each in unlike]
    if not_first:
        parts.append(rf"/[ \t\r\n]*([^ \t\r\n{quoted(not_first).replace('-', chr(92) + '-')}](.|\n)*)?/")
    return f"({' & '.join(parts or [ANY])})"


@lru_cache(64)
def free_of(marks: tuple[str, ...]) -> str:
    """A regular expression of the texts without some marks, which all begin with `<` and have no other.

    It could be said as a complement. But with a bound on the length, llguidance would then search the whole of it for
    a text that still fits, each time that a mark is complete.
    """
    inner = [mark[1:] for mark in marks]
    begun = f"<{_begun(inner)}"
    return f"([^<]|({begun})*<{_missed(inner)})*({begun})*"


def _begun(marks: list[str]) -> str:
    """The beginnings of some marks, up to all but their last characters."""
    inner = [quoted(first) + _begun(rest) for first, rest in _by_first(marks) if "" not in rest]
    return f"({'|'.join(inner)})?" if inner else ""


def _missed(marks: list[str]) -> str:
    """A beginning of some marks and a character that is none of theirs."""
    firsts = "".join(quoted(first).replace("-", r"\-") for first, _ in _by_first(marks))
    inner = [quoted(first) + _missed(rest) for first, rest in _by_first(marks) if "" not in rest]
    return f"({'|'.join([f'[^<{firsts}]', *inner])})"


def _by_first(marks: list[str]) -> list[tuple[str, list[str]]]:
    firsts = dict.fromkeys(mark[0] for mark in marks)
    return [(first, [mark[1:] for mark in marks if mark[0] == first]) for first in firsts]


def unanchored(pattern: str) -> str:
    """A schema's `pattern` as a regular expression for a whole text, between slashes."""
    return "|".join(f"({_branch(each)})" for each in _branches(_translated(pattern)))


def _length(least: int, most: object) -> str:
    return rf"/(.|\n){{{least},{int(most) if isinstance(most, int | float) else ''}}}/"


def _branch(branch: str) -> str:
    inner = _group(branch)
    if inner is not None:
        return "|".join(f"({_branch(each)})" for each in _branches(inner))
    before = "" if branch.startswith("^") else r"(.|\n)*"
    ended = branch.endswith("$") and not _is_escaped(branch, len(branch) - 1)
    return before + branch.removeprefix("^")[: -1 if ended else None].join(("(", ")")) + ("" if ended else r"(.|\n)*")


def _group(branch: str) -> str | None:
    """What is in the one group that a branch is made of, if there are anchors in it."""
    found = re.fullmatch(r"\((?:\?:)?(.*)\)", branch, re.DOTALL)
    if found is None or not re.search(r"[\^$]", found.group(1)) or len(_branches(branch, closed=True)) != 1:
        return None
    return found.group(1)


def _branches(pattern: str, *, closed: bool = False) -> list[str]:
    """The alternatives of a regular expression; or with `closed`, what is between its outermost groups' ends."""
    found, depth, in_class, start = [], 0, False, 0
    for at, character in enumerate(pattern):
        if _is_escaped(pattern, at):
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
            if closed and depth == 0 and at < len(pattern) - 1:
                found.append(pattern[start : at + 1])
                start = at + 1
        elif character == "|" and depth == 0 and not closed:
            found.append(pattern[start:at])
            start = at + 1
    return [*found, pattern[start:]]


def _translated(pattern: str) -> str:
    """With classes that are ASCII, and with what a Lark grammar could take for the end of it escaped."""
    out, at = [], 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\" and at + 1 < len(pattern):
            out.append(_CLASSES.get(pattern[at + 1], pattern[at : at + 2]).replace("\n", "n"))
            at += 2
            continue
        out.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character))
        at += 1
    return "".join(out)


def _is_escaped(text: str, at: int) -> bool:
    backslashes = len(text[:at]) - len(text[:at].rstrip("\\"))
    return backslashes % 2 == 1
