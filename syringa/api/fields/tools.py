"""The `tools` and `tool_choice` fields, and tool calls in OpenAI's wire format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from syringa.api.decoding import convert
from syringa.api.fields.grammars import schema_grammar
from syringa.api.fields.hosted_tools import HOSTED_TOOLS, NAMES, UnsupportedTools, missing_tool, report_hosted_tool
from syringa.api.fields.schema import doc, nullable, object_schema
from syringa.errors import InvalidRequest
from syringa.events import ChoiceFinishReason, ToolCallDelta, ToolCallStart
from syringa.output.collect import CollectedToolCall
from syringa.prompt.chat.tools import ANY_ARGUMENTS, Tool, ToolUse, close_schema

MAX_TOOLS = 128
_NAME = "^[a-zA-Z0-9_-]{1,64}$"
_NAMED = object_schema(("name",), name={"type": "string", "pattern": _NAME})
_CHOICE = object_schema(("type", "function"), type={"const": "function"}, function=_NAMED)

# Tools that only the Responses API may have, or that run at OpenAI.
_HOSTED = (*HOSTED_TOOLS, "mcp", "tool_search")
HOSTED_TOOLS_DOC = (
    f"Hosted tools ({NAMES}, `mcp`, `tool_search`) are not offered to the model, and are named in `x-syringa-ignored`."
)

TOOL_SCHEMA = {
    "anyOf": [
        object_schema(
            ("type", "function"),
            type={"const": "function"},
            function=object_schema(
                ("name",),
                name={"type": "string", "pattern": _NAME},
                description={"type": ["string", "null"]},
                parameters={
                    "type": ["object", "null"],
                    "description": "JSON schema of the arguments, which are an object.",
                },
                strict={"type": ["boolean", "null"], "description": "Constrain the arguments to the schema."},
            ),
        ),
        object_schema(("type",), type={"enum": list(_HOSTED), "description": "Not offered to the model."}),
    ]
}
TOOL_CHOICE_SCHEMA = nullable(
    {"enum": ["none", "auto", "required"]},
    _CHOICE,
    object_schema(
        ("type", "allowed_tools"),
        type={"const": "allowed_tools"},
        allowed_tools=object_schema(
            ("mode", "tools"), mode={"enum": ["auto", "required"]}, tools={"type": "array", "items": _CHOICE}
        ),
    ),
)


ToolsField = (
    Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=TOOL_SCHEMA)]], Meta(max_length=MAX_TOOLS)] | None
)
ToolChoiceField = Annotated[
    Any,
    doc(
        "`none`, `auto`, `required`, a function to call, or `allowed_tools`. Default: `auto` if there are tools.",
        **TOOL_CHOICE_SCHEMA,
    ),
]


class FunctionField(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TypedToolField(msgspec.Struct, kw_only=True):
    """A tool, or a tool choice; its definition is in the field that is named like its type."""

    type: str
    function: Any = None
    allowed_tools: Any = None


class FunctionNameField(msgspec.Struct, kw_only=True):
    name: str


class AllowedToolsField(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[Any]


class ToolChoice(msgspec.Struct, frozen=True):
    """A parsed `tool_choice`: the mode, the tools that may be called, and whether it names a single one."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str]
    named: bool = False


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and whether the client named the one to call."""

    use: ToolUse
    named: bool = False

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """JSON schema of the arguments by name of the functions that may be called; empty if the client gave none."""
        return {tool.name: tool.parameters or {} for tool in self.use.tools if tool.name in self.use.callable}


async def read_tools(
    tools: list[Any] | None,
    choice: Any,
    ignored: list[str],
    *,
    parallel: bool = True,
    constrain_arguments: bool = False,
    unsupported: UnsupportedTools = "ignore",
) -> ToolRequest | None:
    """Validate `tools` and `tool_choice`. Returns None if there are no tools or the choice is `none`.

    The paths of fields that are not honored are appended to `ignored`; with `unsupported` "ignore", those of hosted
    tools too. `constrain_arguments` enforces schemas as far as possible even without `strict`, for models that were not
    trained to call tools.
    """
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequest("tool_choice: expected a string or an object.", param="tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise missing_tool(hosted=False)
        return None
    try:
        return await asyncio.to_thread(_read, tools, choice, ignored, parallel, constrain_arguments, unsupported)
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply.", param="tools") from None


def _read(
    tools: list[Any],
    choice: Any,
    ignored: list[str],
    parallel: bool,
    constrain_arguments: bool,
    unsupported: UnsupportedTools,
) -> ToolRequest | None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}.", param="tools")
    found: dict[str, Tool] = {}
    for index, given in enumerate(tools):
        kind = given.get("type") if isinstance(given, dict) else None
        if kind in _HOSTED:
            report_hosted_tool(kind, f"tools[{index}]", unsupported, ignored)
            continue
        tool = _read_tool(given, f"tools[{index}]", ignored)
        if tool.name in found:
            param = f"tools[{index}].function.name"
            raise InvalidRequest(f"{param}: duplicate function name {tool.name!r}.", param=param)
        found[tool.name] = tool
    chosen = _read_choice(choice, found, ignored)
    return build_tool_request(
        found.values(), chosen, ignored, parallel=parallel, constrain_arguments=constrain_arguments
    )


def build_tool_request(
    tools: Iterable[Tool],
    choice: ToolChoice,
    ignored: list[str],
    *,
    parallel: bool,
    constrain_arguments: bool,
) -> ToolRequest | None:
    """Return the tools with the schemas that constrain their calls; None if the choice is `none` or there are none."""
    if choice.mode == "none":
        return None
    if not choice.names:
        if choice.mode == "required":
            raise missing_tool(hosted=True)
        return None
    known = []
    for tool in tools:
        if tool.parameters is not None and tool.name in choice.names:
            best_effort = choice.mode != "required" and (tool.best_effort or not tool.strict)
            if tool.strict or choice.mode == "required":
                schema = arguments_schema(tool.parameters, tool.path, strict=tool.strict, ignored=ignored)
            else:
                schema = _best_effort_schema(tool.parameters, tool.path) if constrain_arguments else ANY_ARGUMENTS
            tool = msgspec.structs.replace(tool, schema=schema, best_effort=best_effort)
        known.append(tool)
    several = parallel and not choice.named
    use = ToolUse(
        tools=known, mode=choice.mode, callable=choice.names, parallel=several, enforce_schemas=constrain_arguments
    )
    return ToolRequest(use=use, named=choice.named)


def _read_choice(choice: Any, tools: dict[str, Tool], ignored: list[str]) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice("auto", frozenset(tools))
        case "none" | "auto" | "required":
            return ToolChoice(choice, frozenset(tools))
        case str():
            raise InvalidRequest("tool_choice: expected none, auto, required or an object.", param="tool_choice")
    shape = convert(choice, TypedToolField, path="tool_choice", ignored=ignored)
    if shape.type == "function":
        return ToolChoice(
            "required", frozenset({_resolve_name(shape.function, "tool_choice.function", tools)}), named=True
        )
    if shape.type == "allowed_tools":
        path = "tool_choice.allowed_tools"
        allowed = convert(shape.allowed_tools, AllowedToolsField, path=path, ignored=ignored)
        return ToolChoice(allowed.mode, _allowed_names(allowed.tools, f"{path}.tools", tools))
    raise InvalidRequest("tool_choice.type: expected function or allowed_tools.", param="tool_choice.type")


def _read_tool(given: Any, path: str, ignored: list[str]) -> Tool:
    shape = convert(given, TypedToolField, path=path, ignored=ignored)
    if shape.type != "function":
        raise InvalidRequest(
            f"{path}.type: only tools of type function are supported, not {shape.type!r}.", param=f"{path}.type"
        )
    path += ".function"
    return read_function(convert(shape.function, FunctionField, path=path, ignored=ignored), path)


def read_function(function: FunctionField, path: str, *, schema_field: str = "parameters") -> Tool:
    """Convert a function field to a tool. Raises `InvalidRequest` if its arguments are not an object.

    `schema_field` is the field of the request that has the schema.
    """
    if function.name.endswith("\n"):  # `$` in the pattern matches before a final newline
        raise InvalidRequest(f"{path}.name: a name cannot contain a line break.", param=f"{path}.name")
    kind = "object" if function.parameters is None else function.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        path += f".{schema_field}.type"
        raise InvalidRequest(f"{path}: arguments have to be an object.", param=path)
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
        path=f"{path}.{schema_field}",
    )


def arguments_schema(given: dict[str, Any], path: str, *, strict: bool, ignored: list[str]) -> dict[str, Any]:
    """Return the enforceable part of a schema of arguments. Under `strict`, the rest is refused."""
    grammar = schema_grammar({**given, "type": "object"}, path, strict=strict, ignored=ignored)
    return close_schema(json.loads(grammar.value))


def _best_effort_schema(given: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the enforceable part of a schema, or any object if it cannot be enforced at all."""
    try:
        return arguments_schema(given, path, strict=False, ignored=[])
    except InvalidRequest:
        return ANY_ARGUMENTS


def _resolve_name(given: Any, path: str, tools: dict[str, Tool]) -> str:
    name = convert(given, FunctionNameField, path=path).name
    if name not in tools:
        known = ", ".join(tools)
        raise InvalidRequest(f"{path}.name: no function {name!r} in tools ({known}).", param=f"{path}.name")
    return name


def _allowed_names(given: list[Any], path: str, tools: dict[str, Tool]) -> frozenset[str]:
    if not given:
        raise InvalidRequest(f"{path}: expected at least one tool.", param=path)
    names = set()
    for index, each in enumerate(given):
        shape = convert(each, TypedToolField, path=f"{path}[{index}]")
        if shape.type != "function":
            raise InvalidRequest(f"{path}[{index}].type: expected function.", param=f"{path}[{index}].type")
        names.add(_resolve_name(shape.function, f"{path}[{index}].function", tools))
    return frozenset(names)


class FunctionCall(msgspec.Struct):
    arguments: Annotated[str, doc("JSON text of the arguments; in a chunk, a part of it.")]
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call: in a body all fields but `index`; in a chunk its start, or more of its arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Annotated[str | UnsetType, doc("`function`.")] = UNSET
    function: FunctionCall


def call_body(call: CollectedToolCall) -> ToolCall:
    return ToolCall(id=call.id, type="function", function=FunctionCall(call.arguments, call.name))


def call_chunk(event: ToolCallStart | ToolCallDelta) -> ToolCall:
    if isinstance(event, ToolCallStart):
        return ToolCall(index=event.call, id=event.id, type="function", function=FunctionCall("", event.name))
    return ToolCall(index=event.call, function=FunctionCall(event.arguments))


def finish_reason(reason: ChoiceFinishReason, *, named: bool) -> ChoiceFinishReason:
    """Return the wire's finish reason. Like OpenAI, `stop` instead of `tool_calls` if the client named the function."""
    return "stop" if reason == "tool_calls" and named else reason
