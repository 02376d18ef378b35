"""Tools of a request, and their description in prompts for models whose template has no tools, and for raw prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from syringa.output_formats import TOOL_CALL_BEGIN, TOOL_CALL_END

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Of short descriptions of tools.
_SHORT_CHARACTERS = 160
_SHORT_DEPTH = 4
_SHORT_VALUES = 16  # of an enumeration, or alternatives
# Next to these keywords, closing an object could leave no valid value.
_UNCLOSABLE = {
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "patternProperties",
    "unevaluatedProperties",
    "minProperties",
}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function. `schema` is the schema to enforce on its arguments, `parameters` the schema as the client sent it.

    With `best_effort`, the schema is dropped if it cannot be compiled. `path` is that of the schema in the request.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    schema: dict[str, Any] = msgspec.field(default_factory=lambda: _NO_PARAMETERS)
    strict: bool = False
    best_effort: bool = False
    path: str = "tools"


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and how they may be called.

    `auto` allows text and calls, `required` at least one call and nothing else. `callable` contains the names that may
    be called.
    """

    tools: Sequence[Tool]
    mode: Literal["auto", "required"]
    callable: frozenset[str]
    parallel: bool = True  # allow more than one call
    enforce_schemas: bool = False  # also for tools that are not `strict`


def tools_preamble(use: ToolUse, *, short: bool = False) -> str:
    """Return the description of the tools that precedes a prompt. It depends on the tools only, for prefix caching.

    With `short`, a tool is described by its signature and its first sentence.
    """
    if short:
        functions = "\n".join(map(_short_definition, use.tools))
        parameters = "its parameters"
    else:
        functions = "\n".join(json.dumps(tool_definition(tool)["function"], ensure_ascii=False) for tool in use.tools)
        parameters = "a JSON schema of its parameters"
    return (
        f"You can call these functions. Each line describes one, with {parameters}:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "When a function helps, reply with nothing but a call of it, in this format:\n"
        f'{TOOL_CALL_BEGIN}{{"name": "function name", "arguments": {{"parameter": "value"}}}}{TOOL_CALL_END}\n'
        "Otherwise answer in plain text.\n\n"
    )


def tool_definition(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form that prompts and chat templates use."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def _short_definition(tool: Tool) -> str:
    """Return a line such as `get_weather(city: string, unit?: "C" | "F"): Return the weather of a city.`"""
    parameters = tool.parameters if isinstance(tool.parameters, dict) else {}
    description = (tool.description or "").strip().partition("\n")[0].partition(". ")[0][:_SHORT_CHARACTERS]
    return f"{tool.name}({_short_properties(parameters, 0)}): {description}".rstrip(": ")


def _short_properties(schema: dict[str, Any], depth: int) -> str:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return ""
    names = required if isinstance(required, list) else []
    return ", ".join(
        f"{name}{'' if name in names else '?'}: {_short_type(value, depth + 1)}" for name, value in properties.items()
    )


def _short_type(schema: Any, depth: int) -> str:
    """Return the type of a schema as it is written in TypeScript, without what is nested deeply."""
    if not isinstance(schema, dict) or depth > _SHORT_DEPTH:
        return "any"
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values[:_SHORT_VALUES])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return " | ".join(_short_type(each, depth + 1) for each in schema[key][:_SHORT_VALUES])
    kind = schema.get("type")
    if kind == "array":
        return f"{_short_type(schema.get('items'), depth + 1)}[]"
    if kind == "object" and schema.get("properties"):
        return f"{{{_short_properties(schema, depth)}}}"
    if isinstance(kind, list):
        return " | ".join(map(str, kind))
    return str(kind or "any")


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with undeclared properties forbidden.

    A schema that does not mention them allows any, and models would make them up. A value that is valid for the result
    is valid for `schema`.
    """
    text = json.dumps(schema)
    # Subschemas that apply together cannot be closed one by one: nothing could be valid for all of them, or too much.
    independent = not any(f'"{word}"' in text for word in ("allOf", "oneOf", "not", "if"))
    result: dict[str, Any] = _close(schema, independent)
    return result


def _close(schema: Any, independent: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if independent:
        for key in ("$defs", "definitions"):
            if isinstance(schema.get(key), dict):
                result[key] = {name: _close(value, independent) for name, value in schema[key].items()}
        if isinstance(schema.get("anyOf"), list) and "properties" not in schema:
            result["anyOf"] = [_close(value, independent) for value in schema["anyOf"]]
    if _UNCLOSABLE & schema.keys():
        return result
    properties = schema.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {name: _close(value, independent) for name, value in properties.items()}
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in properties for name in map(str, required)):
            result.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        result["items"] = _close(schema["items"], independent)
    return result
