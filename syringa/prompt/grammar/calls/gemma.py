"""Calls in the notation of Gemma 4 and FunctionGemma: `call:name{key:<|"|>text<|"|>,n:12,list:[1,2],of:{x:true}}`.

Since it is not JSON, every schema is written out as rules: one for each different schema, so that a schema that refers
to itself is a rule that does.
"""

from __future__ import annotations

import json
import re
from typing import Any

from syringa.errors import InvalidRequest
from syringa.output_formats import GemmaMarks
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.calls.flat import Flat, all_of, dumped, flatten, is_free
from syringa.prompt.grammar.calls.members import Members, Others, members
from syringa.prompt.grammar.calls.section import Section, callable_tools, is_held, json_value, one_of
from syringa.prompt.grammar.calls.texts import text_terminal
from syringa.prompt.grammar.lark import Spelling

_MOST_RULES = 20_000
_BARE_KEY = r"[^<>{}\[\]:,\"'\s]+"
_COMMA, _EMPTY = '","', '""'
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def gemma(marks: GemmaMarks, use: ToolUse, spelling: Spelling) -> Section:
    """The section of calls in one of the two notations."""
    writer = _Writer(marks, spelling)
    tools = callable_tools(use)
    lines = [one_of("call", [f"call_{index}" for index in range(len(tools))])]
    for index, tool in enumerate(tools):
        arguments = writer.arguments(tool) if is_held(tool, use) else writer.any_object()
        lines.append(f"call_{index}: {spelling.literal('call:' + tool.name)} {arguments}")
    lines += [*writer.lines, f"section: call {spelling.literal(marks.end)}"]
    return Section(trigger=marks.begin, lines=lines, repeats=True)


class _Writer:
    """Collects the rules. Schemas wait in a queue for theirs: they may be nested deeply, and refer to each other."""

    def __init__(self, marks: GemmaMarks, spelling: Spelling) -> None:
        self.lines: list[str] = []
        self._marks, self._spelling = marks, spelling
        self._root: Any = {}
        self._names: dict[str, str] = {}
        self._queue: list[tuple[str, Any]] = []
        self._terminals: dict[str, str] = {}
        self._quote = spelling.literal(marks.quote)
        # A terminal takes as much as it can, so it has what is text of the mark behind it in it.
        self._end, self._end_token = spelling.cut(marks.quote)

    def arguments(self, tool: Tool) -> str:
        """A rule for what the schema of a tool allows."""
        self._root, self._names = tool.schema, {}
        schema = {"type": "object", "allOf": [tool.schema]}
        name = self._value(schema)
        while self._queue:
            rule, schema = self._queue.pop()
            found = [each for flat in flatten(schema, self._root) for each in self._alternatives(flat)]
            if not found:
                raise InvalidRequest(f"tools: nothing fits part of the schema of {tool.name!r}.", param="tools")
            self._add(rule, " | ".join(dict.fromkeys(found)))
        return name

    def any_object(self) -> str:
        """A rule for any object, with any values."""
        if "any_object" not in self._terminals:
            self._terminals["any_object"] = "any_object"
            scalar = json_value({"type": ["number", "boolean", "null"]})
            self._add("any_scalar", scalar)
            text = self._text({}) or ""
            self._add("any_value", f'{text} | any_scalar | "[" (any_value ("," any_value)*)? "]" | any_object')
            self._add("any_pair", f'{self._terminal(f"/{_BARE_KEY}/")} ":" any_value')
            self._add("any_object", '"{" (any_pair ("," any_pair)*)? "}"')
        return "any_object"

    def _value(self, schema: Any) -> str:
        key = dumped(schema)
        if key not in self._names:
            self._names[key] = name = f"value_{len(self.lines)}_{len(self._names)}"
            self._queue.append((name, schema))
        return self._names[key]

    def _alternatives(self, flat: Flat) -> list[str]:
        """What fits one alternative of a schema."""
        types = flat["types"]
        if is_free(flat):
            self.any_object()
            return ["any_value"]
        found = [text] if "string" in types and (text := self._text(flat)) else []
        if "values" in flat:
            written = [self._written(each) for each in flat["values"] if not isinstance(each, str)]
            return [*found, *(self._spelling.literal(each) for each in written if each is not None)]
        found += ['"true"', '"false"'] if "boolean" in types else []
        found += ['"null"'] if "null" in types else []
        if "integer" in types:
            found.append(self._number(flat))
        if "array" in types and (array := self._array(flat)) is not None:
            found.append(array)
        if "object" in types and (inner := members(flat, self._root)) is not None:
            found.append(self._object(inner))
        return found

    def _text(self, flat: Flat) -> str | None:
        body = text_terminal(flat, [self._marks.quote, self._marks.end])
        if body is None:
            return None
        end = f" {json.dumps(self._end, ensure_ascii=False)}" if self._end else ""
        return f"{self._quote} {self._terminal(body + end)} {self._end_token}"

    def _number(self, flat: Flat) -> str:
        kind = "number" if "number" in flat["types"] else "integer"
        schema = {"type": kind, **{key: flat[key] for key in _LIMITS if key in flat}}
        return self._named(json_value(all_of([schema, *({"multipleOf": each} for each in flat.get("multiples", ()))])))

    def _array(self, flat: Flat) -> str | None:
        first, rest = self._items(flat)
        least, most = int(flat.get("minItems", 0)), flat.get("maxItems")
        known = len(first) if rest is None else None
        most = known if most is None else int(most) if known is None else min(int(most), known)
        if most is not None and most < least:
            return None
        if most == 0:
            return '"[" "]"'
        first = first[:most]
        inner = _more(rest, least, most, len(first)) if rest else ""
        if not first and rest:
            inner = f"{rest} {_more(rest, least, most, 1)}"
        for index in range(len(first) - 1, -1, -1):
            item = f"{_COMMA if index else ''} {first[index]} {inner}"
            inner = item if index < least or index == 0 else f"({item})?"
        return self._named(f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"')

    def _items(self, flat: Flat) -> tuple[list[str], str | None]:
        """Rules for the first items, one by one, and for those behind them, if there may be any."""
        parts = []
        for part in flat.get("arrays", []):
            listed = isinstance(part.get("items"), list)
            first = part["items"] if listed else part.get("prefixItems", [])
            parts.append((first, part.get("additionalItems" if listed else "items", True)))
        schemas = [
            all_of(first[index] if index < len(first) else rest for first, rest in parts)
            for index in range(max((len(first) for first, _ in parts), default=0))
        ]
        rest = all_of(rest for _, rest in parts)
        for index, schema in enumerate(schemas):
            if not flatten(schema, self._root):
                return [self._value(each) for each in schemas[:index]], None
        return [self._value(each) for each in schemas], self._value(rest) if flatten(rest, self._root) else None

    def _object(self, inner: Members) -> str:
        """Two rules for each property on: behind another, with a comma, and as the first one."""
        others = " | ".join(f"({self._other(each)})" for each in inner.others)
        more = first = ""
        if others and inner.most != 0:
            other = self._named(others)
            more = _more(other, inner.least, inner.most, 0)
            first = f"{other} {_more(other, inner.least, inner.most, 1)}"
            first = first if inner.least else f"({first})?"
        for each in reversed(inner.named):
            key = self._key(each.name)
            if key is None and not each.required:
                continue
            if key is None:
                raise InvalidRequest(f"tools: the parameter name {each.name!r} has a mark of the model's in it.")
            more = self._named(more or _EMPTY)
            pair = self._named(f"{key} {self._value(each.schema)}")
            first = f"{pair} {more}" + ("" if each.required else f" | {self._named(first or _EMPTY)}")
            more = f'"," {pair} {more}' + ("" if each.required else f" | {more}")
        return self._named(f'"{{" ({first}) "}}"' if first else '"{" "}"')

    def _other(self, each: Others) -> str:
        body = [
            f"/{_BARE_KEY}/",
            *([f"/{each.pattern}/"] if each.pattern else []),
            *(f"~/{some}/" for some in each.unlike),
        ]
        return f'{self._terminal(" & ".join(body))} ":" {self._value(each.schema)}'

    def _key(self, name: str) -> str | None:
        written = self._written_key(name)
        return None if written is None else self._spelling.literal(written + ":")

    def _written_key(self, name: str) -> str | None:
        return name if re.fullmatch(_BARE_KEY, name) else self._written(name)

    def _written(self, value: Any) -> str | None:
        """A value in the notation; None if it has a mark in it."""
        marks = self._marks
        if isinstance(value, str):
            return None if marks.quote in value or marks.end in value else f"{marks.quote}{value}{marks.quote}"
        if isinstance(value, list):
            items = [self._written(each) for each in value]
            return None if None in items else f"[{','.join(map(str, items))}]"
        if isinstance(value, dict):
            pairs = [(self._written_key(key), self._written(each)) for key, each in value.items()]
            if any(None in pair for pair in pairs):
                return None
            return "{" + ",".join(f"{key}:{each}" for key, each in pairs) + "}"
        return json.dumps(value)

    def _named(self, body: str) -> str:
        name = f"rule_{len(self.lines)}"
        self._add(name, body)
        return name

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = f"TEXT_{len(self._terminals)}"
            self._add(self._terminals[body], body)
        return self._terminals[body]

    def _add(self, name: str, body: str) -> None:
        self.lines.append(f"{name}: {body}")
        if len(self.lines) > _MOST_RULES:
            raise InvalidRequest("tools: the schemas are too large for this model's format of calls.", param="tools")


def _more(item: str, least: int, most: int | None, had: int) -> str:
    """Lark: the items behind the first `had`, each with a comma before it."""
    if most is not None and most <= had:
        return ""
    return f'("," {item}){{{max(0, least - had)},{"" if most is None else most - had}}}'
