"""Functions that a model may call: how a prompt tells of them, and the grammar that its calls follow.

This is the plain format, for raw prompts and for models whose template knows no tools:
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which is also what Hermes and Qwen write.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

import msgspec

from syringa.types import Grammar

FORMAT = "hermes"
"""The parser in `output.tools` that reads this format."""

BEGIN, END = "<tool_call>", "</tool_call>"
MAX_CALLS = 8  # under `required`

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Beside these, closing an object could leave nothing that fits.
_OPEN = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties", "minProperties"}


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    @property
    def added_tokens(self) -> frozenset[str]: ...


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function. `schema` is what its arguments are held to, `parameters` what the client said of them."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    schema: dict[str, Any] = msgspec.field(default_factory=lambda: _NO_PARAMETERS)
    strict: bool = False


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and what may be done with them.

    `auto`: text and calls; `required`: at least one call and nothing else. `callable`: the names that may be called.
    """

    tools: Sequence[Tool]
    mode: Literal["auto", "required"]
    callable: frozenset[str]
    parallel: bool = True  # more than one call at once


def preamble(use: ToolUse) -> str:
    """What stands before a prompt. It depends on the tools alone, so that it is computed once for many prompts."""
    functions = "\n".join(json.dumps(describe(tool), ensure_ascii=False) for tool in use.tools)
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its parameters:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "A call is a JSON object with the function's name and its arguments, between tags, like this:\n"
        f'{BEGIN}{{"name": "the function\'s name", "arguments": {{"parameter": "value"}}}}{END}\n\n'
    )


def describe(tool: Tool) -> dict[str, Any]:
    """A tool as prompts and chat templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments without parameters that it does not declare.

    A schema that is silent on them allows any, and a model would make them up. Whatever fits the result fits `schema`.
    """
    result = dict(schema)
    if _OPEN & schema.keys():
        return result
    properties = schema.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {
            name: closed(value) if isinstance(value, dict) else value for name, value in properties.items()
        }
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in properties for name in map(str, required)):
            result.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        result["items"] = closed(schema["items"])
    return result


def special_marks(vocabulary: Vocabulary) -> frozenset[str]:
    """Those of the format's marks that are tokens of their own.

    llguidance takes an added token that is written `<…>` for a special one, whatever the tokenizer says of it, and a
    grammar has to name it as such.
    """
    return vocabulary.added_tokens & {BEGIN, END}


def call_grammar(use: ToolUse, marks: Collection[str] = ()) -> Grammar:
    """What the model may write. `marks`: see `special_marks`.

    Under `auto` text is free until a call begins; from there on it is held to the format, and under a tool's `strict`
    its arguments to the schema. Under `required` there is nothing but calls, and every schema holds.
    """
    begin, end = (mark if mark in marks else json.dumps(mark) for mark in (BEGIN, END))
    tools = [tool for tool in use.tools if tool.name in use.callable]
    lines = [f"body: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        held = tool.strict or use.mode == "required"
        schema = {**(tool.schema if held else _ANY_ARGUMENTS), "x-guidance": _LAYOUT}
        opening = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        lines.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    if use.mode == "required":
        # A line break is so much likelier than any end that, where it may go on to the next call, a model that was not
        # trained on this format calls as often as it can.
        next_ = r'"\n" call' if BEGIN in marks else "call"
        lines.append("start: call" + (f" ({next_}){{0,{MAX_CALLS - 1}}}" if use.parallel else ""))
        lines.append(f"call: {begin} body {end}")
    else:
        lines.append(r"TEXT: /(.|\n)*/")
        # Lazy: once the begin mark is there it is a call, and not more of the text.
        lines.append(f"spelt[lazy]: TEXT {json.dumps(BEGIN)}")
        lines.append("open: spelt" + (f" | TEXT {BEGIN}" if BEGIN in marks else ""))
        lines.append(f"start: (open body {end})* TEXT" if use.parallel else f"start: TEXT | open body {end}")
    return Grammar("lark", "\n".join(lines))
