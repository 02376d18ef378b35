"""Grammar of the notation of Gemma 4 and FunctionGemma: `call:name{key:<|"|>text<|"|>,n:12,list:[1,2],of:{x:true}}`.

Since it is not JSON, schemas are spelled out as rules: one for each distinct schema, so that a recursive schema becomes
a recursive rule.
"""

from __future__ import annotations

import json
import re
from typing import Any

from syringa.errors import InvalidRequest
from syringa.output_formats import GemmaCallFormat
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.tools.base import (
    CallGrammar,
    alternatives,
    callable_tools,
    json_value,
    schema_enforced,
)
from syringa.prompt.grammar.tools.flat_schema import (
    FlatSchema,
    all_of,
    allows_any_value,
    canonical_json,
    flatten,
)
from syringa.prompt.grammar.tools.object_properties import ObjectProperties, OtherProperties, object_properties
from syringa.prompt.grammar.tools.string_terminals import text_terminal

_MAX_RULES = 20_000
_BARE_KEY = r"[^<>{}\[\]:,\"'\s]+"
_COMMA, _EMPTY = '","', '""'
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def gemma_grammar(format: GemmaCallFormat, use: ToolUse, vocabulary: LarkVocabulary) -> CallGrammar:
    """Return the grammar of calls in one of the two notations."""
    writer = _RuleWriter(format, vocabulary)
    tools = callable_tools(use)
    lines = [alternatives("call", [f"call_{index}" for index in range(len(tools))])]
    for index, tool in enumerate(tools):
        arguments = writer.arguments(tool) if schema_enforced(tool, use) else writer.any_object()
        lines.append(f"call_{index}: {vocabulary.literal('call:' + tool.name)} {arguments}")
    lines += [*writer.lines, f"section: call {vocabulary.literal(format.end)}"]
    return CallGrammar(trigger=format.begin, lines=lines, repeats=True)


class _RuleWriter:
    """Collector of Lark rules. Schemas are queued for their rules: they may be deeply nested and mutually recursive."""

    def __init__(self, format: GemmaCallFormat, vocabulary: LarkVocabulary) -> None:
        self.lines: list[str] = []
        self._format, self._vocabulary = format, vocabulary
        self._root: Any = {}
        self._names: dict[str, str] = {}
        self._queue: list[tuple[str, Any]] = []
        self._terminals: dict[str, str] = {}
        self._quote = vocabulary.literal(format.quote)
        # A terminal is greedy, so it includes the part of the end marker that is text.
        self._end_text, self._end_tokens = vocabulary.split_at_special(format.quote)

    def arguments(self, tool: Tool) -> str:
        """Add and return the rule for the arguments that a tool's schema allows."""
        self._root, self._names = tool.schema, {}
        schema = {"type": "object", "allOf": [tool.schema]}
        name = self._value(schema)
        while self._queue:
            rule, schema = self._queue.pop()
            found = [each for flat in flatten(schema, self._root) for each in self._alternatives(flat)]
            if not found:
                raise InvalidRequest(
                    f"tools: no value is valid for a part of the schema of {tool.name!r}.", param="tools"
                )
            self._add(rule, " | ".join(dict.fromkeys(found)))
        return name

    def any_object(self) -> str:
        """Add and return the rule for any object."""
        if "any_object" not in self._terminals:
            self._terminals["any_object"] = "any_object"
            scalar = json_value({"type": ["number", "boolean", "null"]})
            self._add("any_scalar", scalar)
            text = self._string({}) or ""
            self._add("any_value", f'{text} | any_scalar | "[" (any_value ("," any_value)*)? "]" | any_object')
            self._add("any_pair", f'{self._terminal(f"/{_BARE_KEY}/")} ":" any_value')
            self._add("any_object", '"{" (any_pair ("," any_pair)*)? "}"')
        return "any_object"

    def _value(self, schema: Any) -> str:
        key = canonical_json(schema)
        if key not in self._names:
            self._names[key] = name = f"value_{len(self.lines)}_{len(self._names)}"
            self._queue.append((name, schema))
        return self._names[key]

    def _alternatives(self, flat: FlatSchema) -> list[str]:
        """Return the Lark expressions for one alternative of a schema."""
        types = flat["types"]
        if allows_any_value(flat):
            self.any_object()
            return ["any_value"]
        found = [text] if "string" in types and (text := self._string(flat)) else []
        if "values" in flat:
            written = [self._notation(each) for each in flat["values"] if not isinstance(each, str)]
            return [*found, *(self._vocabulary.literal(each) for each in written if each is not None)]
        found += ['"true"', '"false"'] if "boolean" in types else []
        found += ['"null"'] if "null" in types else []
        if "integer" in types:
            found.append(self._number(flat))
        if "array" in types and (array := self._array(flat)) is not None:
            found.append(array)
        if "object" in types and (properties := object_properties(flat, self._root)) is not None:
            found.append(self._object(properties))
        return found

    def _string(self, flat: FlatSchema) -> str | None:
        body = text_terminal(flat, [self._format.quote, self._format.end])
        if body is None:
            return None
        end = f" {json.dumps(self._end_text, ensure_ascii=False)}" if self._end_text else ""
        return f"{self._quote} {self._terminal(body + end)} {self._end_tokens}"

    def _number(self, flat: FlatSchema) -> str:
        kind = "number" if "number" in flat["types"] else "integer"
        schema = {"type": kind, **{key: flat[key] for key in _BOUNDS if key in flat}}
        return self._add_rule(
            json_value(all_of([schema, *({"multipleOf": each} for each in flat.get("multiples", ()))]))
        )

    def _array(self, flat: FlatSchema) -> str | None:
        first, rest = self._items(flat)
        least, most = int(flat.get("minItems", 0)), flat.get("maxItems")
        known = len(first) if rest is None else None
        most = known if most is None else int(most) if known is None else min(int(most), known)
        if most is not None and most < least:
            return None
        if most == 0:
            return '"[" "]"'
        first = first[:most]
        inner = _more_items(rest, least, most, len(first)) if rest else ""
        if not first and rest:
            inner = f"{rest} {_more_items(rest, least, most, 1)}"
        for index in range(len(first) - 1, -1, -1):
            item = f"{_COMMA if index else ''} {first[index]} {inner}"
            inner = item if index < least or index == 0 else f"({item})?"
        return self._add_rule(f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"')

    def _items(self, flat: FlatSchema) -> tuple[list[str], str | None]:
        """Return rules for the first items one by one, and a rule for the following items if there may be any."""
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

    def _object(self, properties: ObjectProperties) -> str:
        """Return the rule for an object. Each property has two rules: as the first one, and after a comma."""
        others = " | ".join(f"({self._other(each)})" for each in properties.others)
        more = first = ""
        if others and properties.max_others != 0:
            other = self._add_rule(others)
            more = _more_items(other, properties.min_others, properties.max_others, 0)
            first = f"{other} {_more_items(other, properties.min_others, properties.max_others, 1)}"
            first = first if properties.min_others else f"({first})?"
        for each in reversed(properties.named):
            key = self._key(each.name)
            if key is None and not each.required:
                continue
            if key is None:
                raise InvalidRequest(
                    f"tools: the parameter name {each.name!r} contains a marker of the model's tool-call format."
                )
            more = self._add_rule(more or _EMPTY)
            pair = self._add_rule(f"{key} {self._value(each.schema)}")
            first = f"{pair} {more}" + ("" if each.required else f" | {self._add_rule(first or _EMPTY)}")
            more = f'"," {pair} {more}' + ("" if each.required else f" | {more}")
        return self._add_rule(f'"{{" ({first}) "}}"' if first else '"{" "}"')

    def _other(self, each: OtherProperties) -> str:
        body = [
            f"/{_BARE_KEY}/",
            *([f"/{each.pattern}/"] if each.pattern else []),
            *(f"~/{some}/" for some in each.excluded),
        ]
        return f'{self._terminal(" & ".join(body))} ":" {self._value(each.schema)}'

    def _key(self, name: str) -> str | None:
        written = self._notation_key(name)
        return None if written is None else self._vocabulary.literal(written + ":")

    def _notation_key(self, name: str) -> str | None:
        return name if re.fullmatch(_BARE_KEY, name) else self._notation(name)

    def _notation(self, value: Any) -> str | None:
        """Return a value in the notation; None if it contains a marker."""
        format = self._format
        if isinstance(value, str):
            contains_marker = format.quote in value or format.end in value
            return None if contains_marker else f"{format.quote}{value}{format.quote}"
        if isinstance(value, list):
            items = [self._notation(each) for each in value]
            return None if None in items else f"[{','.join(map(str, items))}]"
        if isinstance(value, dict):
            pairs = [(self._notation_key(key), self._notation(each)) for key, each in value.items()]
            if any(None in pair for pair in pairs):
                return None
            return "{" + ",".join(f"{key}:{each}" for key, each in pairs) + "}"
        return json.dumps(value)

    def _add_rule(self, body: str) -> str:
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
        if len(self.lines) > _MAX_RULES:
            raise InvalidRequest("tools: the schemas are too large for this model's tool-call format.", param="tools")


def _more_items(item: str, least: int, most: int | None, had: int) -> str:
    """Return the Lark expression for the items after the first `had`, each preceded by a comma."""
    if most is not None and most <= had:
        return ""
    return f'("," {item}){{{max(0, least - had)},{"" if most is None else most - had}}}'
