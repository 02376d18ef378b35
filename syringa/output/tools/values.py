"""One argument that was written as it is, without quotes, made JSON.

The function's schema says what it is:
- a parameter that allows only strings: the text is the string;
- one that does not allow strings: the text is JSON; if it is not, it is a string all the same;
- one that allows both, or of which nothing is known: JSON of an allowed type other than string is that, and all else is
  a string.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from syringa.output.stages import overlap
from syringa.schema_types import Types, type_of

STRING: Types = frozenset({"string"})
_BLANK = " \t\r\n"
# How a text begins that may be JSON of a type.
_STARTS = {"number": "-0123456789", "integer": "-0123456789", "boolean": "tf", "null": "n", "object": "{", "array": "["}
# Some templates print Python's words, and models learn them.
_WORDS = {"True": "true", "False": "false", "None": "null"}


def escaped(text: str) -> str:
    """A text as it stands between the quotes of a JSON string. Characters are escaped one by one, so that the parts of
    a text can be escaped as they come."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def to_json(text: str, types: Types) -> str:
    """A whole value of a parameter that allows `types`."""
    stripped = text.strip(_BLANK)
    try:
        kind = type_of(json.loads(stripped, parse_constant=_refuse))
    except (ValueError, RecursionError):
        if "string" not in types and stripped in _WORDS:
            return _WORDS[stripped]
    else:
        if "string" not in types or (kind != "string" and kind in types):
            return stripped
    return f'"{escaped(text)}"'


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


class ValueReader:
    """Reads a value up to the mark behind it. A string is passed on as it comes, anything else when it is whole."""

    def __init__(self, types: Types, mark: str, *, padded: bool) -> None:
        self.done = False
        self._types = types
        self._mark = mark
        self._padded = padded  # line breaks around the value are not part of it
        self._streams: bool | None = True if types == STRING else None if "string" in types else False
        self._begun = False
        self._end = _ValueEnd(types, mark)

    def read(self, text: str) -> tuple[int, str]:
        """Takes all that has come and was not used before; says how much of it is used now, and gives the JSON."""
        start = 1 if self._padded and not self._begun and text.startswith("\n") else 0
        if self._streams is None:
            self._streams = self._is_text(text)
        if self._streams is None:
            return 0, ""
        used, found = self._read_string(text[start:]) if self._streams else self._read_whole(text[start:])
        return (used + start if used else 0), found

    def _is_text(self, text: str) -> bool | None:
        """Whether the value is sure to be a string; None while it has not begun."""
        begun = text.lstrip(_BLANK)
        if not begun:
            return None
        return not any(begun[0] in _STARTS.get(kind, "") for kind in self._types)

    def _read_whole(self, text: str) -> tuple[int, str]:
        at = self._end.find(text)
        if at < 0:
            return 0, ""
        self.done = True
        return at + len(self._mark), to_json(self._unpadded(text[:at]), self._types)

    def _read_string(self, text: str) -> tuple[int, str]:
        quote = "" if self._begun else '"'
        at = text.find(self._mark)
        if at >= 0:
            self.done = True
            return at + len(self._mark), f'{quote}{escaped(self._unpadded(text[:at]))}"'
        sure = len(text) - overlap(text, self._mark)
        if self._padded and text[:sure].endswith("\n"):
            sure -= 1
        if not sure:
            return 0, ""
        self._begun = True
        return sure, quote + escaped(text[:sure])

    def _unpadded(self, value: str) -> str:
        return value.removesuffix("\n") if self._padded else value


class _ValueEnd:
    """Finds the mark behind a value that may be JSON. Inside its strings, the mark is part of the value.

    A line break inside a string is no JSON: then it was a text with an odd number of quotes, and the first mark counts.
    """

    def __init__(self, types: Types, mark: str) -> None:
        self._types = types
        self._mark = mark
        self._tokens = re.compile(r'\\.|"|\n|' + re.escape(mark), re.DOTALL)
        self._scanned = 0
        self._in_string = False
        self._inside = -1  # the first mark inside a string
        self._is_json: bool | None = None

    def find(self, text: str) -> int:
        """Where the mark is, or -1 if more has to come. `text` is the whole value, as far as it has come."""
        if self._is_json is None:
            self._is_json = self._may_have_strings(text)
        if self._is_json:
            limit = len(text) - overlap(text, self._mark)
            for found in self._tokens.finditer(text, self._scanned, limit):
                self._scanned = found.end()
                if found.group() == "\n" and self._in_string:
                    self._is_json = False
                    if self._inside >= 0:
                        return self._inside
                    break
                if self._ends_at(found.group(), found.start()):
                    return found.start()
            else:
                self._scanned = limit - text.endswith("\\", self._scanned, limit)  # half of an escape
                return -1
        at = text.find(self._mark, self._scanned)
        self._scanned = max(self._scanned, len(text) - len(self._mark))
        return at

    def _ends_at(self, token: str, at: int) -> bool:
        if token == '"':
            self._in_string = not self._in_string
        elif token == self._mark and self._in_string:
            self._inside = at if self._inside < 0 else self._inside
        return token == self._mark and not self._in_string

    def _may_have_strings(self, text: str) -> bool | None:
        begun = text.lstrip(_BLANK)[:1]
        if not begun:
            return None
        return (begun == "{" and "object" in self._types) or (begun == "[" and "array" in self._types)
