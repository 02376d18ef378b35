"""Tools of a request, and their description in prompts for models whose template has no tools, and for raw prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from syringa.output_formats import TOOL_CALL_BEGIN, TOOL_CALL_END

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
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


def tools_preamble(use: ToolUse) -> str:
    """Return the description of the tools that precedes a prompt. It depends on the tools only, for prefix caching."""
    functions = "\n".join(json.dumps(tool_definition(tool)["function"], ensure_ascii=False) for tool in use.tools)
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its parameters:\n"
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
