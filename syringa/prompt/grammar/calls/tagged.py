"""Calls whose arguments stand in tags: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2. The tags are in `dialect.CALL_TAGS`.

A text is written as it is, anything else as JSON. A parameter that may be either is JSON wherever `output.tools.values`
would read it so, and a text otherwise; so a text in its place cannot look like a number or begin like an object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from syringa.errors import InvalidRequest
from syringa.output_formats import CallTags
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.calls.flat import Flat, flatten, is_free
from syringa.prompt.grammar.calls.members import Members, Named, Others, members
from syringa.prompt.grammar.calls.section import Section, callable_tools, is_held, one_of, several
from syringa.prompt.grammar.calls.subschema import Subschemas
from syringa.prompt.grammar.calls.texts import text_terminal
from syringa.prompt.grammar.lark import Spelling
from syringa.schema_types import SchemaTypes, Types

_BLANKS = r"[ \t\r\n]*"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_NUMBERS: Types = frozenset({"number", "integer"})
_LIMITS = {"values", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multiples"}
_STRING: Types = frozenset({"string"})


def tagged(tags: CallTags, use: ToolUse, spelling: Spelling) -> Section:
    """The section of calls in one of these formats."""
    return _Writer(tags, use, spelling).section()


class _Writer:
    """Collects the rules. Equal terminals are written once."""

    def __init__(self, tags: CallTags, use: ToolUse, spelling: Spelling) -> None:
        self._tags, self._use, self._spelling = tags, use, spelling
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._line = '"\\n"' if tags.line_breaks == "always" else '"\\n"?'
        self._pad = "\n" if tags.padded else ""
        # A terminal takes as much as it can, so it has what is text of the mark behind it in it.
        self._end, self._end_token = spelling.cut(self._pad + tags.value_end)

    def section(self) -> Section:
        tags, line = self._tags, self._line
        tools = callable_tools(self._use)
        free = "" if all(is_held(tool, self._use) for tool in tools) else f"{self._rule(self._free())}*"
        for index, tool in enumerate(tools):
            head = self._spelling.literal(tags.call_begin + tool.name + tags.name_end)
            parameters = self._held(tool) if is_held(tool, self._use) else free
            end = self._spelling.literal(tags.call_end) if tags.call_end else ""
            self._lines.append(f"call_{index}: {head} {line} ({parameters}) {end}")
        calls = several("call", line, self._use) if tags.several else "call"
        inner = f"{line} {calls} {line}" if tags.call_end else calls
        lines = [one_of("call", [f"call_{index}" for index in range(len(tools))]), *self._lines]
        lines.append(f"section: {inner} {self._spelling.literal(tags.end)}")
        return Section(trigger=tags.begin, lines=lines, repeats=not tags.several, between=line)

    def _free(self) -> str:
        """Any parameter of any text."""
        text = self._ended(text_terminal({}, [self._tags.value_end]))
        if not self._tags.says_type:
            return self._parameter(self._any_key(), text)
        return f"{self._parameter(self._any_key(), text)} | {self._parameter(self._any_key(), self._json({}), 'false')}"

    def _held(self, tool: Tool) -> str:
        """The parameters that a tool's schema allows, in its order."""
        arguments = _Arguments(tool)
        found = []
        for flat in flatten(tool.schema, tool.schema):
            inner = members(flat, tool.schema) if "object" in flat["types"] else None
            if inner is not None:
                found.append(self._members(inner, arguments))
        if not found:
            raise InvalidRequest(f"tools: no arguments fit the schema of {tool.name!r}.", param="tools")
        return " | ".join(f"({each})" for each in found)

    def _members(self, inner: Members, arguments: _Arguments) -> str:
        parts = [part for each in inner.named if (part := self._named(each, arguments))]
        if inner.others and inner.most != 0:
            others = " | ".join(self._others(each, arguments) for each in inner.others)
            parts.append(f"({others}){{{inner.least},{'' if inner.most is None else inner.most}}}")
        if self._tags.says_type and not inner.least and not any(each.required for each in inner.named):
            # DeepSeek's own encoder leaves an empty line where there are no parameters.
            return f'{" ".join(parts)} | "\\n"' if parts else '"\\n"?'
        return " ".join(parts) or '""'

    def _named(self, each: Named, arguments: _Arguments) -> str:
        tags, key = self._tags, each.name
        if not key or key != key.strip() or tags.key_end in key:
            if not each.required:
                return ""
            raise InvalidRequest(
                f"tools: this model's format has no way to write the parameter {key!r} of {arguments.name!r}.",
                param="tools",
            )
        text = self._spelling.literal(tags.key_begin + key + tags.key_end)
        rule = self._rule(self._of_schema(text, each.schema, arguments.types.parameter(key), arguments))
        return rule if each.required else f"{rule}?"

    def _others(self, each: Others, arguments: _Arguments) -> str:
        like = [f"/{each.pattern}/"] if each.pattern else []
        name = self._terminal(" & ".join([r'/[^<>"\s]+/', *like, *(f"~/{some}/" for some in each.unlike)]))
        begin, end = self._spelling.literal(self._tags.key_begin), self._spelling.literal(self._tags.key_end)
        seen = arguments.types.parameter(None)
        return self._rule(self._of_schema(f"{begin} {name} {end}", each.schema, seen, arguments))

    def _of_schema(self, key: str, schema: Any, seen: Types, arguments: _Arguments) -> str:
        """A parameter with a value that fits. `seen`: the types among which the parser will choose."""
        flats = flatten(schema, arguments.schema)
        types: Types = frozenset().union(*(flat["types"] for flat in flats))
        if self._tags.says_type:
            found = [self._parameter(key, text) for text in self._texts(flats)]
            if types - _STRING:
                value = self._json(arguments.subschemas.of(schema, types - _STRING if "string" in types else None))
                found.append(self._parameter(key, value, "false"))
        elif any(map(is_free, flats)) and self._tags.line_breaks == "always":
            found = [self._parameter(key, self._ended(text_terminal({}, [self._tags.value_end])))]
        else:
            found = [self._parameter(key, value) for value in self._values(schema, flats, types, seen, arguments)]
        if not found:
            raise InvalidRequest(f"tools: a parameter of {arguments.name!r} has no value to write.", param="tools")
        return " | ".join(found)

    def _values(self, schema: Any, flats: list[Flat], types: Types, seen: Types, arguments: _Arguments) -> list[str]:
        if "string" not in types:
            return [self._json(arguments.subschemas.of(schema, None))]
        words, inner = _told_apart(flats)
        limited = bool(_NUMBERS & inner) or not _NUMBERS & types
        texts = self._texts(flats, *_like_json(seen - _STRING, limited=limited))
        found = [*texts, *(self._ended(f"({word})") for word in words)]
        if inner:
            found.append(self._json(arguments.subschemas.of(schema, inner)))
        return found

    def _texts(self, flats: Sequence[Flat], unlike: Sequence[str] = (), not_first: str = "") -> list[str]:
        marks = [self._tags.value_end]
        bodies = [text_terminal(flat, marks, unlike, not_first) for flat in flats if "string" in flat["types"]]
        return [self._ended(body) for body in dict.fromkeys(bodies) if body]

    def _any_key(self) -> str:
        key = self._terminal(r'/[^<>"\n]+/')
        return f"{self._spelling.literal(self._tags.key_begin)} {key} {self._spelling.literal(self._tags.key_end)}"

    def _parameter(self, key: str, value: str, string: str = "true") -> str:
        tags = self._tags
        said = f' string="{string}"' if tags.says_type else ""
        gap = self._line if tags.line_breaks == "sometimes" else ""
        before = said + tags.value_begin + self._pad
        return f"{key} {gap} {self._spelling.literal(before) if before else ''} {value} {self._line}"

    def _json(self, schema: Any) -> str:
        return f"{self._rule(Subschemas.lark(schema))} {self._spelling.literal(self._pad + self._tags.value_end)}"

    def _ended(self, body: str | None) -> str:
        assert body is not None
        end = f" {json.dumps(self._end, ensure_ascii=False)}" if self._end else ""
        return f"{self._terminal(body + end)} {self._end_token}"

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = name = f"TEXT_{len(self._terminals)}"
            self._lines.append(f"{name}: {body}")
        return self._terminals[body]


class _Arguments:
    """What is known of one tool's arguments."""

    def __init__(self, tool: Tool) -> None:
        self.name, self.schema = tool.name, tool.schema
        self.types = SchemaTypes(tool.schema)
        self.subschemas = Subschemas(tool.schema)


def _told_apart(flats: Sequence[Flat]) -> tuple[list[str], Types]:
    """Of values beside texts: those that are words or numbers without limits, as terminals, and the types of the rest.

    Both a text and JSON may go on from a digit, and the longer one would win; a terminal up to the end mark is as long.
    """
    words: list[str] = []
    rest: Types = frozenset()
    for flat in flats:
        types = flat["types"] - _STRING
        limited = bool(_LIMITS & flat.keys())
        if "values" in flat:
            scalars = [each for each in flat["values"] if not isinstance(each, str | list | dict)]
            words += [json.dumps(json.dumps(each)) for each in scalars]
            types &= {"object", "array"}
        words += ['"true" | "false"'] if "boolean" in types else []
        words += ['"null"'] if "null" in types else []
        if types & _NUMBERS and not limited:
            words.append(f"/{_NUMBER}/" if "number" in types else "/-?(0|[1-9][0-9]*)/")
            types -= _NUMBERS
        rest |= types - {"boolean", "null"}
    return list(dict.fromkeys(words)), rest


def _like_json(types: Types, *, limited: bool) -> tuple[list[str], str]:
    """Of texts that would be read as JSON of some types: regular expressions, and with what characters they begin.

    Where numbers are `limited`, a text with a digit first could not be told from one in time.
    """
    found, first = [], ""
    if types & _NUMBERS and limited:
        first += "-0123456789"
    elif types & _NUMBERS:
        found.append(f"{_BLANKS}{_NUMBER}{_BLANKS}")
    if "boolean" in types:
        found.append(f"{_BLANKS}(true|false){_BLANKS}")
    if "null" in types:
        found.append(f"{_BLANKS}null{_BLANKS}")
    return found, first + ("{" if "object" in types else "") + ("[" if "array" in types else "")
