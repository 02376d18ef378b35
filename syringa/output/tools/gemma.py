"""Parser of the notation of Gemma 4 and FunctionGemma: `call:name{key:<|"|>text<|"|>,n:12,list:[1,2],of:{x:true}}`.

It is JSON with unquoted keys, and with a marker on both sides of a string, in which nothing is escaped.
"""

from __future__ import annotations

from syringa.output.stages import Segment, partial_match_length
from syringa.output.tools.base import (
    BaseToolParser,
    ToolSchemas,
    find_first,
    new_call_id,
    starts_with,
    starts_with_any,
)
from syringa.output.tools.json_reader import WHITESPACE
from syringa.output.tools.tagged import MAX_NAME_LENGTH, leading_name
from syringa.output.tools.unquoted_values import STRING, json_escaped, to_json
from syringa.output_formats import GemmaCallFormat
from syringa.schema_types import ALL

_CALL = "call:"
_CLOSERS = {"{": "}", "[": "]"}


class GemmaToolParser(BaseToolParser):
    """Parser of any `GemmaCallFormat`. The states are the positions in the notation."""

    def __init__(self, format: GemmaCallFormat, choice: int, schemas: ToolSchemas | None = None) -> None:
        super().__init__(choice, (format.begin, format.end, format.quote), [format.begin], schemas or {})
        self._end = format.end
        self._quote = format.quote
        self._open: list[str] = []  # brackets
        self._prefix = ""  # comma and key to emit before the next value
        self._string_started = False  # whether part of the current string has been emitted

    def _begin_call(self, out: list[Segment]) -> bool:
        start = self._origin + len(self._openers[0])
        text = self._pending.text[start:].lstrip(WHITESPACE)
        called = starts_with(text, _CALL)
        rest = text[len(_CALL) :].lstrip(WHITESPACE)
        name = leading_name(rest)
        after_name = rest[len(name) :].lstrip(WHITESPACE)
        if called is None or (called and not after_name and len(name) <= MAX_NAME_LENGTH):
            return False
        if not called or not after_name.startswith("{") or not 0 < len(name) <= MAX_NAME_LENGTH:
            return self._reject_call(start, out)
        self._emit_start(name, new_call_id(), out)
        self._pending.discard(len(self._pending.text) - len(after_name) + 1, out)
        self._open, self._prefix = [], ""
        return self._open_bracket("{", out)

    def _open_bracket(self, bracket: str, out: list[Segment]) -> bool:
        self._emit_arguments(self._prefix + bracket, out)
        self._prefix = ""
        self._open.append(bracket)
        self._state = self._before_key if bracket == "{" else self._before_value
        return True

    def _before_key(self, out: list[Segment]) -> bool:
        text = self._skip_whitespace(out)
        quoted = starts_with(text, self._quote)
        if quoted is None:
            return False
        if text.startswith("}"):
            return self._close_bracket(out)
        start = len(self._quote) if quoted else 0
        end = text.find(self._quote if quoted else ":", start)
        if self._end in text[: end if end >= 0 else None] or (not quoted and "}" in text[: max(end, 0)]):
            return self._break_call()
        if end < 0:
            return False
        key = text[start:end] if quoted else text[:end].strip()
        self._prefix += f'"{json_escaped(key)}": '
        self._pending.discard(end + (start or 1), out)
        self._state = self._before_colon if quoted else self._before_value
        return True

    def _before_colon(self, out: list[Segment]) -> bool:
        text = self._skip_whitespace(out)
        if not text:
            return False
        if text[0] != ":":
            return self._break_call()
        self._pending.discard(1, out)
        self._state = self._before_value
        return True

    def _before_value(self, out: list[Segment]) -> bool:
        text = self._skip_whitespace(out)
        begun, marker = starts_with_any(text, (self._quote, "{", "["))
        if begun is None:
            return False
        if text.startswith("]") and self._open[-1] == "[":
            return self._close_bracket(out)
        if not begun:
            return self._read_bare_value(text, out)
        self._pending.discard(len(marker), out)
        if marker != self._quote:
            return self._open_bracket(marker, out)
        self._string_started, self._state = False, self._read_string
        return True

    def _read_bare_value(self, text: str, out: list[Segment]) -> bool:
        """Read a number, a literal of JSON or Python, or a string without quote markers."""
        end = find_first((",", "}", "]", self._end), text)
        if end < 0:
            return False
        value = text[:end]
        if not value:
            return self._break_call()
        self._emit_arguments(self._prefix + to_json(value.strip(), ALL - STRING), out)
        self._pending.discard(len(value), out)
        self._state = self._after_value
        return True

    def _read_string(self, out: list[Segment]) -> bool:
        text = self._pending.text
        markers = (self._quote, self._end)
        at = find_first(markers, text)
        marker = starts_with_any(text[at:], markers)[1] if at >= 0 else ""
        if not marker:
            at = len(text) - max(partial_match_length(text, each) for each in markers)
        before = "" if self._string_started else f'{self._prefix}"'
        if at or marker:
            self._emit_arguments(before + json_escaped(text[:at]) + ('"' if marker else ""), out)
            self._string_started = True
        # A string that is not closed ends with the call.
        self._pending.discard(at + (len(marker) if marker == self._quote else 0), out)
        if marker:
            self._state = self._after_value
        return bool(marker)

    def _after_value(self, out: list[Segment]) -> bool:
        text = self._skip_whitespace(out)
        self._prefix = ""
        if not text:
            return False
        if text[0] == _CLOSERS[self._open[-1]]:
            return self._close_bracket(out)
        if text[0] != ",":
            return self._break_call()
        self._pending.discard(1, out)
        self._prefix = ", "
        self._state = self._before_key if self._open[-1] == "{" else self._before_value
        return True

    def _close_bracket(self, out: list[Segment]) -> bool:
        """Close a bracket; with the outermost one, the arguments are complete."""
        self._emit_arguments(_CLOSERS[self._open.pop()], out)
        self._pending.discard(1, out)
        self._state = self._after_value if self._open else self._after_call
        return True

    def _after_call(self, out: list[Segment]) -> bool:
        text = self._pending.text.lstrip(WHITESPACE)
        ended = starts_with(text, self._end)
        if ended:
            self._pending.discard(len(self._pending.text) - len(text) + len(self._end), out)
        return ended is not None and self._end_calls(out)

    def _break_call(self) -> bool:
        self._state = self._skip_broken
        return True

    def _skip_broken(self, out: list[Segment]) -> bool:
        """Skip the rest of a call that broke after its name; the arguments read so far are closed as valid JSON."""
        if not self._discard_until((self._end,), out):
            return False
        self._emit_arguments("".join(_CLOSERS[bracket] for bracket in reversed(self._open)), out)
        self._pending.discard(len(self._end), out)
        return self._end_calls(out)

    def _skip_whitespace(self, out: list[Segment]) -> str:
        text = self._pending.text
        self._pending.discard(len(text) - len(text.lstrip(WHITESPACE)), out)
        return self._pending.text
