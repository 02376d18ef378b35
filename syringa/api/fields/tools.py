"""`tools` and `tool_choice`: what a body says of functions, and their calls in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from syringa.api.decoding import convert
from syringa.api.fields.annotations import nullable, record, says
from syringa.api.fields.constraints import schema_grammar
from syringa.errors import InvalidRequest
from syringa.events import EndReason, ToolCallDelta, ToolCallStart
from syringa.output.collect import CollectedCall
from syringa.prompt.chat.tools import ANY_ARGUMENTS, Tool, ToolUse, closed
from syringa.prompt.grammar.compile_pool import in_workshop
from syringa.prompt.grammar.validation import validate
from syringa.types import Grammar

MAX_TOOLS = 128
_NAME = "^[a-zA-Z0-9_-]{1,64}$"
_NAMED = record(("name",), name={"type": "string", "pattern": _NAME})
_CHOICE = record(("type", "function"), type={"const": "function"}, function=_NAMED)

TOOL_SCHEMA = record(
    ("type", "function"),
    type={"const": "function"},
    function=record(
        ("name",),
        name={"type": "string", "pattern": _NAME},
        description={"type": ["string", "null"]},
        parameters={"type": ["object", "null"], "description": "A JSON schema of the arguments: an object."},
        strict={"type": ["boolean", "null"], "description": "Hold the arguments to the schema."},
    ),
)
TOOL_CHOICE_SCHEMA = nullable(
    {"enum": ["none", "auto", "required"]},
    _CHOICE,
    record(
        ("type", "allowed_tools"),
        type={"const": "allowed_tools"},
        allowed_tools=record(
            ("mode", "tools"), mode={"enum": ["auto", "required"]}, tools={"type": "array", "items": _CHOICE}
        ),
    ),
)


ToolsField = (
    Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=TOOL_SCHEMA)]], Meta(max_length=MAX_TOOLS)] | None
)
ToolChoiceField = Annotated[
    Any, says("`none`, `auto`, `required`, a function, or `allowed_tools`; absent: `auto`.", **TOOL_CHOICE_SCHEMA)
]


class FunctionField(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TypedField(msgspec.Struct, kw_only=True):
    """A tool, or a choice of one: what it is lies under the name of its type."""

    type: str
    function: Any = None
    allowed_tools: Any = None


class NamedField(msgspec.Struct, kw_only=True):
    name: str


class AllowedField(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[Any]


class Choice(msgspec.Struct, frozen=True):
    """What `tool_choice` asks for, the tools that it leaves, and whether it names one."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str]
    named: bool = False


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request's tools for the model, and whether the client named the one to call."""

    use: ToolUse
    named: bool = False

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """Each function's schema, as far as the client gave one."""
        return {tool.name: tool.parameters or {} for tool in self.use.tools}


async def read_tools(
    tools: list[Any] | None, choice: Any, ignored: list[str], *, parallel: bool = True, hold: bool = False
) -> ToolRequest | None:
    """The tools that may be called; None where there are none or `tool_choice` is `none`.

    What is not honoured of them is added to `ignored`. `hold`: as far as can be, arguments are held to their schemas
    though nobody asked for it. A model that never learned to call would make them up.
    """
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequest("tool_choice: expected a string or an object.", param="tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a tool, and there are no tools.", param="tool_choice")
        return None
    try:
        # Schemas are compiled to see whether they can be.
        return await in_workshop(lambda: _read(tools, choice, ignored, parallel, hold), "tools")
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply.", param="tools") from None


def _read(tools: list[Any], choice: Any, ignored: list[str], parallel: bool, hold: bool) -> ToolRequest | None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}.", param="tools")
    found: dict[str, Tool] = {}
    for index, given in enumerate(tools):
        tool = _read_tool(given, f"tools[{index}]", ignored)
        if tool.name in found:
            param = f"tools[{index}].function.name"
            raise InvalidRequest(f"{param}: there are two functions named {tool.name!r}.", param=param)
        found[tool.name] = tool
    chosen = _read_choice(choice, found, ignored)
    return offer(found.values(), chosen, ignored, parallel=parallel, hold=hold, path="function.parameters")


def offer(
    tools: Iterable[Tool], choice: Choice, ignored: list[str], *, parallel: bool, hold: bool, path: str
) -> ToolRequest | None:
    """The tools with the schemas that their calls are held to. `path`: where in a tool its parameters stand."""
    if choice.mode == "none":
        return None
    known = []
    for index, tool in enumerate(tools):
        if tool.parameters is not None and tool.name in choice.names:
            where = f"tools[{index}].{path}"
            if tool.strict or choice.mode == "required":
                schema = arguments_schema(tool.parameters, where, strict=tool.strict, ignored=ignored)
            else:
                schema = _wanted_schema(tool.parameters, where) if hold else ANY_ARGUMENTS
            tool = msgspec.structs.replace(tool, schema=schema)
        known.append(tool)
    several = parallel and not choice.named
    use = ToolUse(tools=known, mode=choice.mode, callable=choice.names, parallel=several, held=hold)
    return ToolRequest(use=use, named=choice.named)


def _read_choice(choice: Any, tools: dict[str, Tool], ignored: list[str]) -> Choice:
    match choice:
        case None:
            return Choice("auto", frozenset(tools))
        case "none" | "auto" | "required":
            return Choice(choice, frozenset(tools))
        case str():
            raise InvalidRequest("tool_choice: expected none, auto, required or an object.", param="tool_choice")
    shape = convert(choice, TypedField, path="tool_choice", ignored=ignored)
    if shape.type == "function":
        return Choice("required", frozenset({_named(shape.function, "tool_choice.function", tools)}), named=True)
    if shape.type == "allowed_tools":
        path = "tool_choice.allowed_tools"
        allowed = convert(shape.allowed_tools, AllowedField, path=path, ignored=ignored)
        return Choice(allowed.mode, _allowed(allowed.tools, f"{path}.tools", tools))
    raise InvalidRequest("tool_choice.type: expected function or allowed_tools.", param="tool_choice.type")


def _read_tool(given: Any, path: str, ignored: list[str]) -> Tool:
    shape = convert(given, TypedField, path=path, ignored=ignored)
    if shape.type != "function":
        raise InvalidRequest(
            f"{path}.type: only tools of type function are served here, not {shape.type!r}.", param=f"{path}.type"
        )
    path += ".function"
    return read_function(convert(shape.function, FunctionField, path=path, ignored=ignored), path)


def read_function(function: FunctionField, path: str) -> Tool:
    """A function whose arguments are an object, as they have to be."""
    if function.name.endswith("\n"):  # which the pattern lets pass
        raise InvalidRequest(f"{path}.name: a name has no line break.", param=f"{path}.name")
    kind = "object" if function.parameters is None else function.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        path += ".parameters.type"
        raise InvalidRequest(f"{path}: arguments are an object.", param=path)
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
    )


def arguments_schema(given: dict[str, Any], path: str, *, strict: bool, ignored: list[str]) -> dict[str, Any]:
    """What arguments can be held to. Under `strict` it is refused if that is less than the schema says."""
    grammar = schema_grammar({**given, "type": "object"}, path, strict=strict, ignored=ignored)
    schema = closed(json.loads(grammar.value))
    try:
        validate(Grammar("json_schema", json.dumps(schema)))
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", param=path, code=error.code) from None
    return schema


def _wanted_schema(given: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema as far as it can be enforced, since nobody insists."""
    try:
        return arguments_schema(given, path, strict=False, ignored=[])
    except InvalidRequest:
        return ANY_ARGUMENTS


def _named(given: Any, path: str, tools: dict[str, Tool]) -> str:
    name = convert(given, NamedField, path=path).name
    if name not in tools:
        known = ", ".join(tools)
        raise InvalidRequest(
            f"{path}.name: there is no function {name!r} among the tools ({known}).", param=f"{path}.name"
        )
    return name


def _allowed(given: list[Any], path: str, tools: dict[str, Tool]) -> frozenset[str]:
    if not given:
        raise InvalidRequest(f"{path}: expected at least one.", param=path)
    names = set()
    for index, each in enumerate(given):
        shape = convert(each, TypedField, path=f"{path}[{index}]")
        if shape.type != "function":
            raise InvalidRequest(f"{path}[{index}].type: expected function.", param=f"{path}[{index}].type")
        names.add(_named(shape.function, f"{path}[{index}].function", tools))
    return frozenset(names)


class FunctionCall(msgspec.Struct):
    arguments: Annotated[str, says("JSON text; in a chunk, a part of it.")]
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in a body, which has all but `index`; in a chunk, a call's beginning, or more of its arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Annotated[str | UnsetType, says("`function`.")] = UNSET
    function: FunctionCall


def call_body(call: CollectedCall) -> ToolCall:
    return ToolCall(id=call.id, type="function", function=FunctionCall(call.arguments, call.name))


def call_chunk(event: ToolCallStart | ToolCallDelta) -> ToolCall:
    if isinstance(event, ToolCallStart):
        return ToolCall(index=event.call, id=event.id, type="function", function=FunctionCall("", event.name))
    return ToolCall(index=event.call, function=FunctionCall(event.arguments))


def finish_reason(reason: EndReason, *, named: bool) -> EndReason:
    """OpenAI says `stop` where the client itself `named` the function."""
    return "stop" if reason == "tool_calls" and named else reason
