"""Functions that a model may call, and how a prompt tells of them where the model's template does not: raw prompts, and
models that were not taught any format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

TOOL_CALL_BEGIN, TOOL_CALL_END = "<tool_call>", "</tool_call>"
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Beside these, closing an object could leave nothing that fits.
_OPEN = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties", "minProperties"}


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
    enforce_schemas: bool = False  # also for tools that are not `strict`


def tools_preamble(use: ToolUse) -> str:
    """What stands before a prompt. It depends on the tools alone, so that it is computed once for many prompts."""
    functions = "\n".join(json.dumps(tool_definition(tool)["function"], ensure_ascii=False) for tool in use.tools)
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its parameters:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "When a function helps, reply with nothing but a call of it, in this format:\n"
        f'{TOOL_CALL_BEGIN}{{"name": "function name", "arguments": {{"parameter": "value"}}}}{TOOL_CALL_END}\n'
        "Otherwise answer in plain text.\n\n"
    )


def tool_definition(tool: Tool) -> dict[str, Any]:
    """A tool as prompts and chat templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not declare.

    A schema that is silent on them allows any, and a model would make them up. Whatever fits the result fits `schema`.
    """
    text = json.dumps(schema)
    # Parts that hold together with others must not be closed one by one: nothing could fit them all, or too much.
    alone = not any(f'"{word}"' in text for word in ("allOf", "oneOf", "not", "if"))
    result: dict[str, Any] = _closed(schema, alone)
    return result


def _closed(schema: Any, alone: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if alone:
        for key in ("$defs", "definitions"):
            if isinstance(schema.get(key), dict):
                result[key] = {name: _closed(value, alone) for name, value in schema[key].items()}
        if isinstance(schema.get("anyOf"), list) and "properties" not in schema:
            result["anyOf"] = [_closed(value, alone) for value in schema["anyOf"]]
    if _OPEN & schema.keys():
        return result
    properties = schema.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {name: _closed(value, alone) for name, value in properties.items()}
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in properties for name in map(str, required)):
            result.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        result["items"] = _closed(schema["items"], alone)
    return result
