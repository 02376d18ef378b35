"""Conversion of an argument that was written without quotes to JSON.

The type follows from the function's schema:
- a parameter that allows only strings: the text is the string;
- one that does not allow strings: the text is JSON, or a string if it is not valid JSON;
- one that allows both, or without a schema: JSON of an allowed type other than string is kept, anything else is a
  string.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from syringa.output.stages import partial_match_length
from syringa.schema_types import Types, type_of

STRING: Types = frozenset({"string"})
_WHITESPACE = " \t\r\n"
# First characters of JSON values by type.
_FIRST_CHARACTERS = {
    "number": "-0123456789",
    "integer": "-0123456789",
    "boolean": "tf",
    "null": "n",
    "object": "{",
    "array": "[",
}
# Some templates print Python literals, and models learn them.
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def json_escaped(text: str) -> str:
    """Return the text as it is written between the quotes of a JSON string.

    Characters are escaped one by one, so the parts of a text can be escaped separately.
    """
    return json.dumps(text, ensure_ascii=False)[1:-1]


def to_json(text: str, types: Types) -> str:
    """Return a complete value of a parameter that allows `types` as JSON."""
    stripped = text.strip(_WHITESPACE)
    try:
        kind = type_of(json.loads(stripped, parse_constant=_reject_constant))
    except (ValueError, RecursionError):
        if "string" not in types and stripped in _PYTHON_LITERALS:
            return _PYTHON_LITERALS[stripped]
    else:
        if "string" not in types or (kind != "string" and kind in types):
            return stripped
    return f'"{json_escaped(text)}"'


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(name)


class UnquotedValueReader:
    """Incremental reader of a value up to its end marker.

    A string is returned as it is written, any other value once it is complete.
    """

    def __init__(self, types: Types, end_marker: str, *, padded: bool) -> None:
        self.done = False
        self._types = types
        self._end_marker = end_marker
        self._padded = padded  # line breaks around the value are not part of it
        self._is_string: bool | None = True if types == STRING else None if "string" in types else False
        self._started = False
        self._end_finder = _ValueEndFinder(types, end_marker)

    def read(self, text: str) -> tuple[int, str]:
        """Take all unused text; return how many characters are used now, and the new JSON text."""
        start = 1 if self._padded and not self._started and text.startswith("\n") else 0
        if self._is_string is None:
            self._is_string = self._must_be_string(text)
        if self._is_string is None:
            return 0, ""
        used, found = self._read_string(text[start:]) if self._is_string else self._read_complete(text[start:])
        return (used + start if used else 0), found

    def _must_be_string(self, text: str) -> bool | None:
        """Return whether the value cannot be anything but a string; None if it has not begun."""
        begun = text.lstrip(_WHITESPACE)
        if not begun:
            return None
        return not any(begun[0] in _FIRST_CHARACTERS.get(kind, "") for kind in self._types)

    def _read_complete(self, text: str) -> tuple[int, str]:
        at = self._end_finder.find(text)
        if at < 0:
            return 0, ""
        self.done = True
        return at + len(self._end_marker), to_json(self._without_padding(text[:at]), self._types)

    def _read_string(self, text: str) -> tuple[int, str]:
        quote = "" if self._started else '"'
        at = text.find(self._end_marker)
        if at >= 0:
            self.done = True
            return at + len(self._end_marker), f'{quote}{json_escaped(self._without_padding(text[:at]))}"'
        decided = len(text) - partial_match_length(text, self._end_marker)
        if self._padded and text[:decided].endswith("\n"):
            decided -= 1
        if not decided:
            return 0, ""
        self._started = True
        return decided, quote + json_escaped(text[:decided])

    def _without_padding(self, value: str) -> str:
        return value.removesuffix("\n") if self._padded else value


class _ValueEndFinder:
    """Finder of the end marker of a value that may be JSON, in whose strings the marker is part of the value.

    A line break inside a string is not valid JSON: then the value is a text with an odd number of quotes, and the first
    marker ends it.
    """

    def __init__(self, types: Types, end_marker: str) -> None:
        self._types = types
        self._end_marker = end_marker
        self._tokens = re.compile(r'\\.|"|\n|' + re.escape(end_marker), re.DOTALL)
        self._scanned = 0
        self._in_string = False
        self._first_quoted_marker = -1  # position of the first marker inside a string
        self._is_json: bool | None = None

    def find(self, text: str) -> int:
        """Return the position of the marker in the value read so far, or -1 if more input is needed."""
        if self._is_json is None:
            self._is_json = self._may_have_strings(text)
        if self._is_json:
            limit = len(text) - partial_match_length(text, self._end_marker)
            for found in self._tokens.finditer(text, self._scanned, limit):
                self._scanned = found.end()
                if found.group() == "\n" and self._in_string:
                    self._is_json = False
                    if self._first_quoted_marker >= 0:
                        return self._first_quoted_marker
                    break
                if self._ends_at(found.group(), found.start()):
                    return found.start()
            else:
                self._scanned = limit - text.endswith("\\", self._scanned, limit)  # half of an escape sequence
                return -1
        at = text.find(self._end_marker, self._scanned)
        self._scanned = max(self._scanned, len(text) - len(self._end_marker))
        return at

    def _ends_at(self, token: str, at: int) -> bool:
        if token == '"':
            self._in_string = not self._in_string
        elif token == self._end_marker and self._in_string:
            self._first_quoted_marker = at if self._first_quoted_marker < 0 else self._first_quoted_marker
        return token == self._end_marker and not self._in_string

    def _may_have_strings(self, text: str) -> bool | None:
        begun = text.lstrip(_WHITESPACE)[:1]
        if not begun:
            return None
        return (begun == "{" and "object" in self._types) or (begun == "[" and "array" in self._types)
