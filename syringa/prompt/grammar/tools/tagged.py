"""Grammar of calls with one tag for each argument: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2.

The tags are in `output_formats.TAGGED_FORMATS`. Strings are written as they are, other values as JSON. A parameter that
may be either is JSON wherever `output.tools.unquoted_values` would read it so, and a string otherwise; a string in its
place cannot look like a number or start like an object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from syringa.errors import InvalidRequest
from syringa.output_formats import TaggedCallFormat
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.tools.base import (
    CallGrammar,
    alternatives,
    callable_tools,
    json_value,
    repeated_calls,
    schema_enforced,
)
from syringa.prompt.grammar.tools.flat_schema import FlatSchema, allows_any_value, flatten
from syringa.prompt.grammar.tools.object_properties import (
    NamedProperty,
    ObjectProperties,
    OtherProperties,
    object_properties,
)
from syringa.prompt.grammar.tools.string_terminals import text_terminal
from syringa.schema_types import SchemaTypes, Types

_WHITESPACE = r"[ \t\r\n]*"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_NUMBERS: Types = frozenset({"number", "integer"})
_BOUNDS = {"values", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multiples"}
_STRING: Types = frozenset({"string"})


def tagged_grammar(tags: TaggedCallFormat, use: ToolUse, vocabulary: LarkVocabulary) -> CallGrammar:
    """Return the grammar of calls in one of these formats."""
    return _RuleWriter(tags, use, vocabulary).grammar()


class _RuleWriter:
    """Collector of Lark rules. Equal terminals are written once."""

    def __init__(self, tags: TaggedCallFormat, use: ToolUse, vocabulary: LarkVocabulary) -> None:
        self._tags, self._use, self._vocabulary = tags, use, vocabulary
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._line_break = '"\\n"' if tags.line_breaks == "always" else '"\\n"?'
        self._pad = "\n" if tags.padded else ""
        # A terminal is greedy, so it includes the part of the end marker that is text.
        self._end_text, self._end_tokens = vocabulary.split_at_special(self._pad + tags.value_end)

    def grammar(self) -> CallGrammar:
        tags, line_break = self._tags, self._line_break
        tools = callable_tools(self._use)
        all_enforced = all(schema_enforced(tool, self._use) for tool in tools)
        free = "" if all_enforced else f"{self._rule(self._free_parameter())}*"
        for index, tool in enumerate(tools):
            head = self._vocabulary.literal(tags.call_begin + tool.name + tags.name_end)
            parameters = self._parameters(tool) if schema_enforced(tool, self._use) else free
            end = self._vocabulary.literal(tags.call_end) if tags.call_end else ""
            self._lines.append(f"call_{index}: {head} {line_break} ({parameters}) {end}")
        calls = repeated_calls("call", line_break, self._use) if tags.multiple_calls else "call"
        inner = f"{line_break} {calls} {line_break}" if tags.call_end else calls
        lines = [alternatives("call", [f"call_{index}" for index in range(len(tools))]), *self._lines]
        lines.append(f"section: {inner} {self._vocabulary.literal(tags.end)}")
        return CallGrammar(trigger=tags.begin, lines=lines, repeats=not tags.multiple_calls, separator=line_break)

    def _free_parameter(self) -> str:
        """Return the expression for any parameter with any text."""
        text = self._ended(text_terminal({}, [self._tags.value_end]))
        if not self._tags.type_attribute:
            return self._parameter(self._any_key(), text)
        as_json = self._parameter(self._any_key(), self._json({}), "false")
        return f"{self._parameter(self._any_key(), text)} | {as_json}"

    def _parameters(self, tool: Tool) -> str:
        """Return the expression for the parameters that a tool's schema allows, in its order."""
        arguments = _ArgumentSchema(tool)
        found = []
        for flat in flatten(tool.schema, tool.schema):
            properties = object_properties(flat, tool.schema) if "object" in flat["types"] else None
            if properties is not None:
                found.append(self._properties(properties, arguments))
        if not found:
            raise InvalidRequest(f"tools: no arguments are valid for the schema of {tool.name!r}.", param="tools")
        return " | ".join(f"({each})" for each in found)

    def _properties(self, properties: ObjectProperties, arguments: _ArgumentSchema) -> str:
        parts = [part for each in properties.named if (part := self._named_property(each, arguments))]
        if properties.others and properties.max_others != 0:
            others = " | ".join(self._other_properties(each, arguments) for each in properties.others)
            most = "" if properties.max_others is None else properties.max_others
            parts.append(f"({others}){{{properties.min_others},{most}}}")
        optional = not properties.min_others and not any(each.required for each in properties.named)
        if self._tags.type_attribute and optional:
            # DeepSeek's own encoder writes an empty line if there are no parameters.
            return f'{" ".join(parts)} | "\\n"' if parts else '"\\n"?'
        return " ".join(parts) or '""'

    def _named_property(self, each: NamedProperty, arguments: _ArgumentSchema) -> str:
        tags, key = self._tags, each.name
        if not key or key != key.strip() or tags.key_end in key:
            if not each.required:
                return ""
            raise InvalidRequest(
                f"tools: the name of the parameter {key!r} of {arguments.name!r} cannot be written in this model's "
                "tool-call format.",
                param="tools",
            )
        text = self._vocabulary.literal(tags.key_begin + key + tags.key_end)
        rule = self._rule(self._valid_parameter(text, each.schema, arguments.types.parameter(key), arguments))
        return rule if each.required else f"{rule}?"

    def _other_properties(self, each: OtherProperties, arguments: _ArgumentSchema) -> str:
        like = [f"/{each.pattern}/"] if each.pattern else []
        name = self._terminal(" & ".join([r'/[^<>"\s]+/', *like, *(f"~/{some}/" for some in each.excluded)]))
        begin, end = self._vocabulary.literal(self._tags.key_begin), self._vocabulary.literal(self._tags.key_end)
        parsed_types = arguments.types.parameter(None)
        return self._rule(self._valid_parameter(f"{begin} {name} {end}", each.schema, parsed_types, arguments))

    def _valid_parameter(self, key: str, schema: Any, parsed_types: Types, arguments: _ArgumentSchema) -> str:
        """Return the expression for a parameter with a valid value. The parser chooses among `parsed_types`."""
        flats = flatten(schema, arguments.schema)
        types: Types = frozenset().union(*(flat["types"] for flat in flats))
        if self._tags.type_attribute:
            found = [self._parameter(key, text) for text in self._texts(flats)]
            if types - _STRING:
                value = self._json(arguments.standalone(schema, types - _STRING if "string" in types else None))
                found.append(self._parameter(key, value, "false"))
        elif any(map(allows_any_value, flats)) and self._tags.line_breaks == "always":
            found = [self._parameter(key, self._ended(text_terminal({}, [self._tags.value_end])))]
        else:
            found = [
                self._parameter(key, value) for value in self._values(schema, flats, types, parsed_types, arguments)
            ]
        if not found:
            raise InvalidRequest(f"tools: no value is valid for a parameter of {arguments.name!r}.", param="tools")
        return " | ".join(found)

    def _values(
        self, schema: Any, flats: list[FlatSchema], types: Types, parsed_types: Types, arguments: _ArgumentSchema
    ) -> list[str]:
        if "string" not in types:
            return [self._json(arguments.standalone(schema, None))]
        literals, inner = _split_literals(flats)
        bounded = bool(_NUMBERS & inner) or not _NUMBERS & types
        texts = self._texts(flats, *_json_like(parsed_types - _STRING, bounded=bounded))
        found = [*texts, *(self._ended(f"({literal})") for literal in literals)]
        if inner:
            found.append(self._json(arguments.standalone(schema, inner)))
        return found

    def _texts(self, flats: Sequence[FlatSchema], unlike: Sequence[str] = (), not_first: str = "") -> list[str]:
        markers = [self._tags.value_end]
        bodies = [text_terminal(flat, markers, unlike, not_first) for flat in flats if "string" in flat["types"]]
        return [self._ended(body) for body in dict.fromkeys(bodies) if body]

    def _any_key(self) -> str:
        key = self._terminal(r'/[^<>"\n]+/')
        return f"{self._vocabulary.literal(self._tags.key_begin)} {key} {self._vocabulary.literal(self._tags.key_end)}"

    def _parameter(self, key: str, value: str, string: str = "true") -> str:
        tags = self._tags
        attribute = f' string="{string}"' if tags.type_attribute else ""
        gap = self._line_break if tags.line_breaks == "sometimes" else ""
        before = attribute + tags.value_begin + self._pad
        return f"{key} {gap} {self._vocabulary.literal(before) if before else ''} {value} {self._line_break}"

    def _json(self, schema: Any) -> str:
        return f"{self._rule(json_value(schema))} {self._vocabulary.literal(self._pad + self._tags.value_end)}"

    def _ended(self, body: str | None) -> str:
        assert body is not None
        end = f" {json.dumps(self._end_text, ensure_ascii=False)}" if self._end_text else ""
        return f"{self._terminal(body + end)} {self._end_tokens}"

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = name = f"TEXT_{len(self._terminals)}"
            self._lines.append(f"{name}: {body}")
        return self._terminals[body]


class _ArgumentSchema:
    """The schema of one tool's arguments, and its parts as schemas of their own."""

    def __init__(self, tool: Tool) -> None:
        self.name, self.schema = tool.name, tool.schema
        self.types = SchemaTypes(tool.schema)
        self._relocated: Any = None

    def standalone(self, schema: Any, types: Types | None) -> Any:
        """Return a part of the schema as a schema of its own, restricted to some types.

        References lead into the whole schema, which is included under `$defs`.
        """
        if types is not None:
            schema = {"type": sorted(types), "allOf": [schema]}
        if '"$ref"' not in json.dumps(schema):
            return schema
        if self._relocated is None:
            self._relocated = _relocate(self.schema)
        return {**_relocate(schema), "$defs": {"arguments": self._relocated}}


def _relocate(schema: Any) -> Any:
    """Return the schema with references to the root's place under `$defs`."""
    if isinstance(schema, list):
        return [_relocate(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    relocated = {key: _relocate(each) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        relocated["$ref"] = "#/$defs/arguments" + reference[1:]
    return relocated


def _split_literals(flats: Sequence[FlatSchema]) -> tuple[list[str], Types]:
    """Return the literals and unbounded numbers among the values as terminals, and the types of the other values.

    After a digit both a string and JSON may continue, and the longer match wins; a terminal that includes the end
    marker is as long as a string.
    """
    literals: list[str] = []
    rest: Types = frozenset()
    for flat in flats:
        types = flat["types"] - _STRING
        bounded = bool(_BOUNDS & flat.keys())
        if "values" in flat:
            scalars = [each for each in flat["values"] if not isinstance(each, str | list | dict)]
            literals += [json.dumps(json.dumps(each)) for each in scalars]
            types &= {"object", "array"}
        literals += ['"true" | "false"'] if "boolean" in types else []
        literals += ['"null"'] if "null" in types else []
        if types & _NUMBERS and not bounded:
            literals.append(f"/{_NUMBER}/" if "number" in types else "/-?(0|[1-9][0-9]*)/")
            types -= _NUMBERS
        rest |= types - {"boolean", "null"}
    return list(dict.fromkeys(literals)), rest


def _json_like(types: Types, *, bounded: bool) -> tuple[list[str], str]:
    """Return what strings must not look like to be read as strings: regular expressions, and first characters.

    Where numbers are `bounded`, a string that starts with a digit cannot be distinguished from a number in time.
    """
    found, first = [], ""
    if types & _NUMBERS and bounded:
        first += "-0123456789"
    elif types & _NUMBERS:
        found.append(f"{_WHITESPACE}{_NUMBER}{_WHITESPACE}")
    if "boolean" in types:
        found.append(f"{_WHITESPACE}(true|false){_WHITESPACE}")
    if "null" in types:
        found.append(f"{_WHITESPACE}null{_WHITESPACE}")
    return found, first + ("{" if "object" in types else "") + ("[" if "array" in types else "")
