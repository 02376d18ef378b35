"""Lark terminals for strings that are written without quotes and escapes, from what a schema says about them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from syringa.prompt.grammar.lark import ANY_TEXT, escape_regex
from syringa.prompt.grammar.tools.flat_schema import FlatSchema

# In JSON schemas these classes are ASCII only, in Lark they are not.
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_CLASSES |= {"s": r"[ \t\n\r\f\v]", "S": r"[^ \t\n\r\f\v]"}

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"({_YEAR}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_CLOCK = "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_WORD = r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~-]{1,16}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_H = "[0-9A-Fa-f]{1,4}"
# Some groups, `::` for at least one group, and the rest.
_SHORTENED = "|".join(
    f"({_H}(:{_H}){{{left - 1}}})?::({_H}(:{_H}){{0,{6 - left}}})?" if left else f"::({_H}(:{_H}){{0,6}})?"
    for left in range(7)
)
_IPV6 = f"(({_H}:){{7}}{_H}|{_SHORTENED}|({_H}:){{7}}:)"
_PATH = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(\/\/{_HOST}(:[0-9]{{1,5}})?(\/{_PATH}*)*|{_PATH}+(\/{_PATH}*)*)"
_MORE = rf"(({_PATH}|[\/?])*)"

# JSON Schema's string formats. Each regular expression allows what the standard allows or less, never more. Left out
# are quotes and comments in addresses, numeric hosts in URIs, second 60 and the year 0000.
FORMAT_REGEXES: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}(T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"{_WORD}(\.{_WORD}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"{_URI}(\?{_MORE})?(#{_MORE})?",
}


def text_terminal(
    flat: FlatSchema, without: Sequence[str] = (), unlike: Sequence[str] = (), not_first: str = ""
) -> str | None:
    """Return the body of a Lark terminal for the strings that a flat schema allows; None if there are none.

    The strings contain none of the markers `without`, match none of the regular expressions `unlike`, and their first
    character that is not whitespace is none of `not_first`.
    """
    parts = []
    if "values" in flat:
        texts = [each for each in flat["values"] if isinstance(each, str)]
        texts = [each for each in texts if not any(marker in each for marker in without)]
        if not texts:
            return None
        parts.append("(" + " | ".join(json.dumps(each, ensure_ascii=False) for each in texts) + ")")
    if "minLength" in flat or "maxLength" in flat:
        parts.append(_length_regex(int(flat.get("minLength", 0)), flat.get("maxLength")))
    parts += [f"/{anchored_pattern(pattern)}/" for pattern in flat.get("patterns", ())]
    parts += [f"/{FORMAT_REGEXES[each]}/" for each in flat.get("formats", ()) if each in FORMAT_REGEXES]
    if without and "values" not in flat:
        parts.append(f"/{_without_markers(tuple(without))}/")
    parts += [f"~/{each}/" for each in unlike]
    if not_first:
        parts.append(rf"/[ \t\r\n]*([^ \t\r\n{escape_regex(not_first).replace('-', chr(92) + '-')}](.|\n)*)?/")
    return f"({' & '.join(parts or [ANY_TEXT])})"


@lru_cache(64)
def _without_markers(markers: tuple[str, ...]) -> str:
    """Return a regular expression for the texts without some markers, each of which has a single `<`, at its start.

    A complement would be simpler. But with a bound on the length, llguidance would search all of it for a valid text
    each time a marker is complete.
    """
    inner = [marker[1:] for marker in markers]
    prefix = f"<{_proper_prefixes(inner)}"
    return f"([^<]|({prefix})*<{_mismatches(inner)})*({prefix})*"


def _proper_prefixes(markers: list[str]) -> str:
    """Return an expression for the prefixes of the markers without their last characters."""
    inner = [
        escape_regex(first) + _proper_prefixes(rest) for first, rest in _by_first_character(markers) if "" not in rest
    ]
    return f"({'|'.join(inner)})?" if inner else ""


def _mismatches(markers: list[str]) -> str:
    """Return an expression for a prefix of the markers followed by a character that continues none of them."""
    firsts = "".join(escape_regex(first).replace("-", r"\-") for first, _ in _by_first_character(markers))
    inner = [escape_regex(first) + _mismatches(rest) for first, rest in _by_first_character(markers) if "" not in rest]
    return f"({'|'.join([f'[^<{firsts}]', *inner])})"


def _by_first_character(markers: list[str]) -> list[tuple[str, list[str]]]:
    firsts = dict.fromkeys(marker[0] for marker in markers)
    return [(first, [marker[1:] for marker in markers if marker[0] == first]) for first in firsts]


def anchored_pattern(pattern: str) -> str:
    """Return a schema's `pattern`, which may match anywhere, as a regular expression for a whole text."""
    return "|".join(f"({_anchored_branch(each)})" for each in _branches(_translate(pattern)))


def _length_regex(least: int, most: object) -> str:
    return rf"/(.|\n){{{least},{int(most) if isinstance(most, int | float) else ''}}}/"


def _anchored_branch(branch: str) -> str:
    inner = _anchored_group(branch)
    if inner is not None:
        return "|".join(f"({_anchored_branch(each)})" for each in _branches(inner))
    before = "" if branch.startswith("^") else r"(.|\n)*"
    ended = branch.endswith("$") and not _is_escaped(branch, len(branch) - 1)
    return before + branch.removeprefix("^")[: -1 if ended else None].join(("(", ")")) + ("" if ended else r"(.|\n)*")


def _anchored_group(branch: str) -> str | None:
    """Return the content of the single group that a branch consists of, if it contains anchors."""
    found = re.fullmatch(r"\((?:\?:)?(.*)\)", branch, re.DOTALL)
    if found is None or not re.search(r"[\^$]", found.group(1)) or len(_branches(branch, closed=True)) != 1:
        return None
    return found.group(1)


def _branches(pattern: str, *, closed: bool = False) -> list[str]:
    """Return the alternatives of a regular expression; with `closed`, its parts up to the ends of outermost groups."""
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


def _translate(pattern: str) -> str:
    """Return the pattern with ASCII classes, and with escapes for what would end it in a Lark grammar."""
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
