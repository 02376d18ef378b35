"""Calls whose arguments stand in tags, as Qwen3-Coder, GLM, MiniMax and DeepSeek V3.2 write them. The tags of each are
in `dialect.CALL_TAGS`; what becomes of a value is in `values`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from syringa.output.stages import Part
from syringa.output.tools.call import BLANKS
from syringa.output.tools.stage import CallStage, begins, new_id
from syringa.output.tools.values import STRING, ValueReader, escaped
from syringa.output_formats import CallTags
from syringa.schema_types import ALL, SchemaTypes, Types

NAME = re.compile(r"[\w.:/-]*")
LONGEST_NAME = 256


class TaggedCalls(CallStage):
    """Its states follow the order of the tags: text, name, between parameters, key, value, behind a call."""

    def __init__(self, tags: CallTags, choice: int, parameters: Mapping[str, Any] | None = None) -> None:
        marks = (tags.begin, tags.end, tags.call_begin, tags.call_end, tags.key_begin, tags.key_end, tags.value_begin)
        super().__init__(choice, {*marks, tags.value_end, tags.token} - {""}, [tags.begin])
        self._tags = tags
        self._schemas = {name: SchemaTypes(schema) for name, schema in (parameters or {}).items()}
        self._types: SchemaTypes | None = None  # of the call at hand
        self._key = ""  # JSON, before the value of the parameter at hand
        self._value = ValueReader(STRING, tags.value_end, padded=False)
        self._parameters = 0  # of the call at hand
        # A call ends with its own mark, or without one when the section does.
        self._ends = (tags.call_end, tags.end) if tags.call_end else (tags.end,)

    def _begin(self, out: list[Part]) -> bool:
        start = self._origin + len(self._tags.begin)
        found = self._read_head(start, out)
        return self._refuse(start, out) if found is False else bool(found)

    def _read_head(self, start: int, out: list[Part]) -> bool | None:
        """Reads `call_begin` NAME `name_end` in what is held, from `start` on: False if it is not there, None if more
        has to come."""
        tags, text = self._tags, self._held.text
        head = text[start:].lstrip(BLANKS)
        begun = begins(head, tags.call_begin)
        if not begun:
            return begun
        rest = head[len(tags.call_begin) :]
        name = leading_name(rest)
        behind = rest[len(name) :].lstrip(BLANKS)
        # Without a mark of its own, a name ends where the first parameter or the end begins.
        ended, _ = one_begins(behind, (tags.name_end,) if tags.name_end else (tags.key_begin, tags.end))
        if len(name) > LONGEST_NAME or (ended and not name):
            return False
        if not ended:
            return ended
        self._tell(name, new_id(), out)
        self._types, self._parameters = self._schemas.get(name), 0
        self._held.drop(len(text) - len(behind) + len(tags.name_end), out)
        self._state = self._between
        return True

    def _between(self, out: list[Part]) -> bool:
        """Before a parameter or the end of the call."""
        text = self._held.text.lstrip(BLANKS)
        begun, mark = one_begins(text, (self._tags.key_begin, *self._ends))
        if begun is None:
            return False
        if not begun:
            self._state = self._skip
            return True
        self._held.drop(len(self._held.text) - len(text) + len(mark), out)
        if mark == self._tags.key_begin:
            self._state = self._read_key
            return True
        return self._end_call(mark, out)

    def _read_key(self, out: list[Part]) -> bool:
        tags = self._tags
        key, mark, rest = self._held.text.partition(tags.key_end)
        said, opened, value = rest.partition(tags.value_begin) if tags.value_begin else ("", mark, rest)
        if any(end in key + mark + said for end in self._ends):
            self._state = self._skip
            return True
        if not opened:
            return False
        key = key.strip()
        self._held.drop(len(self._held.text) - len(value), out)
        self._key = ("{" if not self._parameters else ", ") + f'"{escaped(key)}": '
        self._value = ValueReader(self._types_of(key, said), tags.value_end, padded=tags.padded)
        self._parameters += 1
        self._state = self._read_value
        return True

    def _types_of(self, key: str, said: str) -> Types:
        types = ALL if self._types is None else self._types.parameter(key)
        if self._tags.says_type and 'string="true"' in said:
            return STRING
        if self._tags.says_type and 'string="false"' in said:
            return types - STRING or ALL - STRING
        return types

    def _read_value(self, out: list[Part]) -> bool:
        used, value = self._value.read(self._held.text)
        self._held.drop(used, out)
        if value:
            self._argue(self._key + value, out)
            self._key = ""
        if self._value.done:
            self._state = self._between
        return self._value.done

    def _end_call(self, mark: str, out: list[Part]) -> bool:
        self._argue("}" if self._parameters else "{}", out)
        if mark == self._tags.end:
            return self._rest(out)
        self._state = self._behind
        return True

    def _behind(self, out: list[Part]) -> bool:
        """Behind a call: the end of the section or, where a section has several, the next call."""
        tags = self._tags
        text = self._held.text.lstrip(BLANKS)
        ended = begins(text, tags.end)
        if ended:
            self._held.drop(len(self._held.text) - len(text) + len(tags.end), out)
            return self._rest(out)
        if not tags.several:  # a model that leaves the mark out goes on with text
            return ended is False and self._rest(out)
        found = self._read_head(0, out)
        if ended is False and found is False:
            self._state = self._skip_section
            return True
        return bool(found)

    def _skip(self, out: list[Part]) -> bool:
        """In a call that is broken behind its name: what was read of it stays, as JSON that is whole."""
        if not self._skip_past(self._ends, out):
            return False
        _, mark = one_begins(self._held.text, self._ends)
        self._held.drop(len(mark), out)
        return self._end_call(mark, out)

    def _skip_section(self, out: list[Part]) -> bool:
        if not self._skip_past((self._tags.end,), out):
            return False
        self._held.drop(len(self._tags.end), out)
        return self._rest(out)


def leading_name(text: str) -> str:
    """The function's name that a text begins with, as far as it has come."""
    found = NAME.match(text)
    return found.group() if found else ""


def one_begins(text: str, marks: Sequence[str]) -> tuple[bool | None, str]:
    """Whether a text begins with one of some marks, and with which; None while that is open."""
    found = [begins(text, mark) for mark in marks]
    if True in found:
        return True, marks[found.index(True)]
    return (None if None in found else False), ""
