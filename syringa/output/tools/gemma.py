"""Calls in the notation of Gemma 4 and FunctionGemma: `call:name{key:<|"|>text<|"|>,n:12,list:[1,2],of:{x:true}}`.

It is JSON with keys that have no quotes, and with a mark on both sides of a text, in which nothing is escaped.
"""

from __future__ import annotations

from syringa.output.stages import Part, overlap
from syringa.output.tools.call import BLANKS
from syringa.output.tools.stage import CallStage, begins, first_of, new_id
from syringa.output.tools.tagged import LONGEST_NAME, leading_name, one_begins
from syringa.output.tools.values import STRING, escaped, to_json
from syringa.output_formats import GemmaMarks
from syringa.schema_types import ALL

_CALL = "call:"
_CLOSED_BY = {"{": "}", "[": "]"}


class GemmaCalls(CallStage):
    """Its states are the places in the notation: before a key, before a value, in a text, behind a value."""

    def __init__(self, marks: GemmaMarks, choice: int, parameters: object = None) -> None:
        super().__init__(choice, (marks.begin, marks.end, marks.quote), [marks.begin])
        self._end = marks.end
        self._quote = marks.quote
        self._open: list[str] = []  # the brackets that are open
        self._waiting = ""  # a comma or a key, for the value to come
        self._begun = False  # whether part of the text at hand has been told

    def _begin(self, out: list[Part]) -> bool:
        start = self._origin + len(self._openers[0])
        text = self._held.text[start:].lstrip(BLANKS)
        called = begins(text, _CALL)
        rest = text[len(_CALL) :].lstrip(BLANKS)
        name = leading_name(rest)
        behind = rest[len(name) :].lstrip(BLANKS)
        if called is None or (called and not behind and len(name) <= LONGEST_NAME):
            return False
        if not called or not behind.startswith("{") or not 0 < len(name) <= LONGEST_NAME:
            return self._refuse(start, out)
        self._tell(name, new_id(), out)
        self._held.drop(len(self._held.text) - len(behind) + 1, out)
        self._open, self._waiting = [], ""
        return self._enter("{", out)

    def _enter(self, bracket: str, out: list[Part]) -> bool:
        self._argue(self._waiting + bracket, out)
        self._waiting = ""
        self._open.append(bracket)
        self._state = self._before_key if bracket == "{" else self._before_value
        return True

    def _before_key(self, out: list[Part]) -> bool:
        text = self._skip_blanks(out)
        quoted = begins(text, self._quote)
        if quoted is None:
            return False
        if text.startswith("}"):
            return self._leave(out)
        start = len(self._quote) if quoted else 0
        end = text.find(self._quote if quoted else ":", start)
        if self._end in text[: end if end >= 0 else None] or (not quoted and "}" in text[: max(end, 0)]):
            return self._break()
        if end < 0:
            return False
        key = text[start:end] if quoted else text[:end].strip()
        self._waiting += f'"{escaped(key)}": '
        self._held.drop(end + (start or 1), out)
        self._state = self._before_colon if quoted else self._before_value
        return True

    def _before_colon(self, out: list[Part]) -> bool:
        text = self._skip_blanks(out)
        if not text:
            return False
        if text[0] != ":":
            return self._break()
        self._held.drop(1, out)
        self._state = self._before_value
        return True

    def _before_value(self, out: list[Part]) -> bool:
        text = self._skip_blanks(out)
        begun, mark = one_begins(text, (self._quote, "{", "["))
        if begun is None:
            return False
        if text.startswith("]") and self._open[-1] == "[":
            return self._leave(out)
        if not begun:
            return self._read_word(text, out)
        self._held.drop(len(mark), out)
        if mark != self._quote:
            return self._enter(mark, out)
        self._begun, self._state = False, self._read_text
        return True

    def _read_word(self, text: str, out: list[Part]) -> bool:
        """A number, a word of JSON or Python, or a text that has no marks."""
        end = first_of((",", "}", "]", self._end), text)
        if end < 0:
            return False
        word = text[:end]
        if not word:
            return self._break()
        self._argue(self._waiting + to_json(word.strip(), ALL - STRING), out)
        self._held.drop(len(word), out)
        self._state = self._behind_value
        return True

    def _read_text(self, out: list[Part]) -> bool:
        text = self._held.text
        marks = (self._quote, self._end)
        at = first_of(marks, text)
        mark = one_begins(text[at:], marks)[1] if at >= 0 else ""
        if not mark:
            at = len(text) - max(overlap(text, each) for each in marks)
        before = "" if self._begun else f'{self._waiting}"'
        if at or mark:
            self._argue(before + escaped(text[:at]) + ('"' if mark else ""), out)
            self._begun = True
        # A text that is not closed ends with the call.
        self._held.drop(at + (len(mark) if mark == self._quote else 0), out)
        if mark:
            self._state = self._behind_value
        return bool(mark)

    def _behind_value(self, out: list[Part]) -> bool:
        text = self._skip_blanks(out)
        self._waiting = ""
        if not text:
            return False
        if text[0] == _CLOSED_BY[self._open[-1]]:
            return self._leave(out)
        if text[0] != ",":
            return self._break()
        self._held.drop(1, out)
        self._waiting = ", "
        self._state = self._before_key if self._open[-1] == "{" else self._before_value
        return True

    def _leave(self, out: list[Part]) -> bool:
        """A bracket closes; with the first one, the arguments are whole."""
        self._argue(_CLOSED_BY[self._open.pop()], out)
        self._held.drop(1, out)
        self._state = self._behind_value if self._open else self._behind_call
        return True

    def _behind_call(self, out: list[Part]) -> bool:
        text = self._held.text.lstrip(BLANKS)
        ended = begins(text, self._end)
        if ended:
            self._held.drop(len(self._held.text) - len(text) + len(self._end), out)
        return ended is not None and self._rest(out)

    def _break(self) -> bool:
        self._state = self._skip
        return True

    def _skip(self, out: list[Part]) -> bool:
        """In a call that is broken behind its name: what was read of it stays, as JSON that is whole."""
        if not self._skip_past((self._end,), out):
            return False
        self._argue("".join(_CLOSED_BY[bracket] for bracket in reversed(self._open)), out)
        self._held.drop(len(self._end), out)
        return self._rest(out)

    def _skip_blanks(self, out: list[Part]) -> str:
        text = self._held.text
        self._held.drop(len(text) - len(text.lstrip(BLANKS)), out)
        return self._held.text
