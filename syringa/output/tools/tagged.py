"""Parser of calls with one tag for each argument: Qwen3-Coder, GLM, MiniMax and DeepSeek V3.2.

The tags are in `output_formats.TAGGED_FORMATS`; values are converted to JSON by `unquoted_values`.
"""

from __future__ import annotations

import re

from syringa.output.stages import Segment
from syringa.output.tools.base import BaseToolParser, ToolSchemas, new_call_id, starts_with, starts_with_any
from syringa.output.tools.json_reader import WHITESPACE
from syringa.output.tools.unquoted_values import STRING, UnquotedValueReader, json_escaped
from syringa.output_formats import TaggedCallFormat
from syringa.schema_types import ALL, SchemaTypes, Types

MAX_NAME_LENGTH = 256
_NAME = re.compile(r"[\w.:/-]*")


class TaggedToolParser(BaseToolParser):
    """Parser of any `TaggedCallFormat`. The states follow the order of the tags."""

    def __init__(self, tags: TaggedCallFormat, choice: int, schemas: ToolSchemas | None = None) -> None:
        markers = (tags.begin, tags.end, tags.call_begin, tags.call_end, tags.key_begin, tags.key_end, tags.value_begin)
        super().__init__(choice, {*markers, tags.value_end, tags.inner_token} - {""}, [tags.begin], schemas or {})
        self._tags = tags
        self._schema_types = {name: SchemaTypes(schema) for name, schema in (schemas or {}).items()}
        self._types: SchemaTypes | None = None  # of the current call
        self._key = ""  # JSON text to emit before the value of the current parameter
        self._value = UnquotedValueReader(STRING, tags.value_end, padded=False)
        self._parameters = 0  # of the current call
        # A call ends with its own marker, or with the section where that is missing.
        self._ends = (tags.call_end, tags.end) if tags.call_end else (tags.end,)

    def _begin_call(self, out: list[Segment]) -> bool:
        start = self._origin + len(self._tags.begin)
        found = self._read_head(start, out)
        return self._reject_call(start, out) if found is False else bool(found)

    def _read_head(self, start: int, out: list[Segment]) -> bool | None:
        """Read `call_begin` NAME `name_end` from `start` on; return False if it is not there, None if undecided."""
        tags, text = self._tags, self._pending.text
        head = text[start:].lstrip(WHITESPACE)
        begun = starts_with(head, tags.call_begin)
        if not begun:
            return begun
        rest = head[len(tags.call_begin) :]
        name = leading_name(rest)
        after_name = rest[len(name) :].lstrip(WHITESPACE)
        # Without a marker of its own, a name ends where the first parameter or the end begins.
        ended, _ = starts_with_any(after_name, (tags.name_end,) if tags.name_end else (tags.key_begin, tags.end))
        if len(name) > MAX_NAME_LENGTH or (ended and not name):
            return False
        if not ended:
            return ended
        self._emit_start(name, new_call_id(), out)
        self._types, self._parameters = self._schema_types.get(name), 0
        self._pending.discard(len(text) - len(after_name) + len(tags.name_end), out)
        self._state = self._before_parameter
        return True

    def _before_parameter(self, out: list[Segment]) -> bool:
        """Read the start of a parameter or the end of the call."""
        text = self._pending.text.lstrip(WHITESPACE)
        begun, marker = starts_with_any(text, (self._tags.key_begin, *self._ends))
        if begun is None:
            return False
        if not begun:
            self._state = self._skip_broken
            return True
        self._pending.discard(len(self._pending.text) - len(text) + len(marker), out)
        if marker == self._tags.key_begin:
            self._state = self._read_key
            return True
        return self._end_call(marker, out)

    def _read_key(self, out: list[Segment]) -> bool:
        tags = self._tags
        key, marker, rest = self._pending.text.partition(tags.key_end)
        attributes, opened, value = rest.partition(tags.value_begin) if tags.value_begin else ("", marker, rest)
        if any(end in key + marker + attributes for end in self._ends):
            self._state = self._skip_broken
            return True
        if not opened:
            return False
        key = key.strip()
        self._pending.discard(len(self._pending.text) - len(value), out)
        self._key = ("{" if not self._parameters else ", ") + f'"{json_escaped(key)}": '
        self._value = UnquotedValueReader(self._types_of(key, attributes), tags.value_end, padded=tags.padded)
        self._parameters += 1
        self._state = self._read_value
        return True

    def _types_of(self, key: str, attributes: str) -> Types:
        types = ALL if self._types is None else self._types.parameter(key)
        if self._tags.type_attribute and 'string="true"' in attributes:
            return STRING
        if self._tags.type_attribute and 'string="false"' in attributes:
            return types - STRING or ALL - STRING
        return types

    def _read_value(self, out: list[Segment]) -> bool:
        used, value = self._value.read(self._pending.text)
        self._pending.discard(used, out)
        if value:
            self._emit_arguments(self._key + value, out)
            self._key = ""
        if self._value.done:
            self._state = self._before_parameter
        return self._value.done

    def _end_call(self, marker: str, out: list[Segment]) -> bool:
        self._emit_arguments("}" if self._parameters else "{}", out)
        if marker == self._tags.end:
            return self._end_calls(out)
        self._state = self._after_call
        return True

    def _after_call(self, out: list[Segment]) -> bool:
        """Read the end of the section or, where a section may have several calls, the next call."""
        tags = self._tags
        text = self._pending.text.lstrip(WHITESPACE)
        ended = starts_with(text, tags.end)
        if ended:
            self._pending.discard(len(self._pending.text) - len(text) + len(tags.end), out)
            return self._end_calls(out)
        if not tags.multiple_calls:  # a model that leaves the end marker out continues with text
            return ended is False and self._end_calls(out)
        found = self._read_head(0, out)
        if ended is False and found is False:
            self._state = self._skip_section
            return True
        return bool(found)

    def _skip_broken(self, out: list[Segment]) -> bool:
        """Skip the rest of a call that broke after its name; the arguments read so far are closed as valid JSON."""
        if not self._discard_until(self._ends, out):
            return False
        _, marker = starts_with_any(self._pending.text, self._ends)
        self._pending.discard(len(marker), out)
        return self._end_call(marker, out)

    def _skip_section(self, out: list[Segment]) -> bool:
        if not self._discard_until((self._tags.end,), out):
            return False
        self._pending.discard(len(self._tags.end), out)
        return self._end_calls(out)


def leading_name(text: str) -> str:
    """Return the function name at the start of the text, which may be incomplete."""
    found = _NAME.match(text)
    return found.group() if found else ""
