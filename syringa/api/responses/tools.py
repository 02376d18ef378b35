"""The `tools` and `tool_choice` fields of responses: functions, and custom tools with a text or grammar as input."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.tools import (
    MAX_TOOLS,
    FunctionField,
    ToolChoice,
    ToolRequest,
    arguments_schema,
    build_tool_request,
    read_function,
)
from syringa.api.responses.custom_input import custom_tool_parameters
from syringa.api.responses.lark_to_regex import lark_to_regex
from syringa.api.responses.schemas import NAME
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.schema import enforceable_schema

_TEXT = {"type": "text"}


class ToolTypeField(msgspec.Struct, kw_only=True):
    type: str


class FunctionToolField(FunctionField, kw_only=True):
    type: str


class CustomToolField(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=NAME)]
    description: str | None = None
    format: Any = None


class CustomFormatField(msgspec.Struct, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class NamedToolField(msgspec.Struct, kw_only=True):
    type: str
    name: str


class AllowedToolsChoice(msgspec.Struct, kw_only=True):
    type: str
    mode: Literal["auto", "required"]
    tools: list[Any]


class ResponseTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a response: for the model, the names of custom ones, and the field as the response repeats it."""

    request: ToolRequest | None = None
    custom: frozenset[str] = frozenset()
    echo: list[dict[str, Any]] = []


async def read_response_tools(
    tools: list[Any] | None,
    choice: Any,
    ignored: list[str],
    *,
    parallel: bool,
    constrain_arguments: bool,
    open_mode: bool,
) -> ResponseTools:
    """Validate `tools` and `tool_choice`. The paths of fields that are not honored are appended to `ignored`.

    `constrain_arguments` is that of `syringa.api.fields.tools.read_tools`.
    """
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequest("tool_choice: expected a string or an object.", param="tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice requires a tool, but there are no tools.", param="tool_choice")
        return ResponseTools()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}.", param="tools")
    try:
        reader = _Reader(ignored, open_mode)
        return await asyncio.to_thread(reader.read, tools, choice, parallel, constrain_arguments)
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply.", param="tools") from None


class _Reader:
    def __init__(self, ignored: list[str], open_mode: bool) -> None:
        self._ignored, self._open_mode = ignored, open_mode
        self._tools: dict[str, Tool] = {}
        self._types: dict[str, str] = {}
        self._echo: list[dict[str, Any]] = []
        # Argument schemas of custom tools with a grammar, and the paths of the grammars.
        self._grammar_schemas: dict[str, tuple[dict[str, Any], str]] = {}

    def read(self, tools: list[Any], choice: Any, parallel: bool, constrain_arguments: bool) -> ResponseTools:
        for index, given in enumerate(tools):
            path = f"tools[{index}]"
            tool, kind = self._tool(given, path)
            if tool.name in self._tools:
                raise InvalidRequest(f"{path}.name: duplicate tool name {tool.name!r}.", param=f"{path}.name")
            self._tools[tool.name], self._types[tool.name] = tool, kind
        chosen = self._choice(choice)
        request = build_tool_request(
            self._tools.values(),
            chosen,
            self._ignored,
            parallel=parallel,
            constrain_arguments=constrain_arguments,
            path="parameters",
        )
        if request is not None and self._grammar_schemas:
            request = msgspec.structs.replace(request, use=self._with_patterns(request.use))
        custom = frozenset(name for name, kind in self._types.items() if kind == "custom")
        return ResponseTools(request=request, custom=custom, echo=self._echo)

    def _tool(self, given: Any, path: str) -> tuple[Tool, str]:
        kind = convert(given, ToolTypeField, path=path).type
        if kind == "function":
            return self._function(given, path), kind
        if kind == "custom" and not self._open_mode:
            return self._custom(given, path), kind
        supported = "tools of type function" if self._open_mode else "tools of type function and custom"
        raise InvalidRequest(f"{path}.type: only {supported} are supported, not {kind!r}.", param=f"{path}.type")

    def _function(self, given: Any, path: str) -> Tool:
        field = convert(given, FunctionToolField, path=path, ignored=self._ignored)
        tool = read_function(field, path)
        if field.strict is None:
            strict = _can_enforce(tool, f"{path}.parameters")
            tool = msgspec.structs.replace(tool, strict=strict, best_effort=True)
        self._echo.append(
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
        )
        return tool

    def _custom(self, given: Any, path: str) -> Tool:
        field = convert(given, CustomToolField, path=path, ignored=self._ignored)
        format = convert(_TEXT if field.format is None else field.format, CustomFormatField, path=f"{path}.format")
        described = {} if field.description is None else {"description": field.description}
        echo = {name: value for name, value in msgspec.to_builtins(format).items() if value is not None}
        self._echo.append({"type": "custom", "name": field.name, **described, "format": echo})
        # The model sees a custom tool as a function with one text parameter, described by the client's grammar.
        description = None
        if format.type == "grammar":
            self._grammar_schemas[field.name] = _grammar_schema(format, f"{path}.format"), f"{path}.format.definition"
            description = f"A text that matches this {format.syntax} grammar:\n{format.definition}"
        return Tool(
            name=field.name, description=field.description, parameters=custom_tool_parameters(description), strict=True
        )

    def _with_patterns(self, use: ToolUse) -> ToolUse:
        tools = []
        for tool in use.tools:
            schema, path = self._grammar_schemas.get(tool.name, (tool.schema, tool.path))
            tools.append(msgspec.structs.replace(tool, schema=schema, path=path))
        return msgspec.structs.replace(use, tools=tools)

    def _choice(self, choice: Any) -> ToolChoice:
        names = frozenset(self._tools)
        match choice:
            case None:
                return ToolChoice("auto", names)
            case "none" | "auto" | "required":
                return ToolChoice(choice, names)
            case str():
                raise InvalidRequest("tool_choice: expected none, auto, required or an object.", param="tool_choice")
        kind = convert(choice, ToolTypeField, path="tool_choice").type
        if kind == "allowed_tools":
            allowed = convert(choice, AllowedToolsChoice, path="tool_choice", ignored=self._ignored)
            return ToolChoice(allowed.mode, self._allowed_names(allowed.tools, "tool_choice.tools"))
        return ToolChoice("required", frozenset({self._resolve_name(choice, "tool_choice")}), named=True)

    def _allowed_names(self, given: list[Any], path: str) -> frozenset[str]:
        if not given:
            raise InvalidRequest(f"{path}: expected at least one tool.", param=path)
        return frozenset(self._resolve_name(each, f"{path}[{index}]") for index, each in enumerate(given))

    def _resolve_name(self, given: Any, path: str) -> str:
        kind = convert(given, ToolTypeField, path=path).type
        if kind not in ("function", "custom"):
            also = ", custom or allowed_tools" if path == "tool_choice" else " or custom"
            raise InvalidRequest(f"{path}.type: expected function{also}, not {kind!r}.", param=f"{path}.type")
        name = convert(given, NamedToolField, path=path, ignored=self._ignored).name
        if self._types.get(name) != kind:
            known = ", ".join(each for each, type_ in self._types.items() if type_ == kind) or "none"
            raise InvalidRequest(f"{path}.name: no {kind} tool {name!r} in tools ({known}).", param=f"{path}.name")
        return name


def _can_enforce(tool: Tool, path: str) -> bool:
    """Return whether a schema can be enforced, as far as is known before it is compiled.

    If it can, functions without `strict` are strict in this API.
    """
    try:
        arguments_schema(tool.parameters or {}, path, strict=True, ignored=[])
    except InvalidRequest:
        return False
    return True


def _grammar_schema(format: CustomFormatField, path: str) -> dict[str, Any]:
    """Return the argument schema of a custom tool with a grammar. Raises `InvalidRequest`."""
    for name in ("syntax", "definition"):
        if getattr(format, name) is None:
            raise InvalidRequest(f"{path}.{name}: required for a grammar.", param=f"{path}.{name}")
    definition = format.definition or ""
    path += ".definition"
    pattern = definition if format.syntax == "regex" else lark_to_regex(definition, path)
    schema = custom_tool_parameters(pattern=pattern)
    _, left_out, _ = enforceable_schema(schema)
    if left_out:
        raise InvalidRequest(f"{path}: look-around and backreferences are not supported.", param=path)
    return schema
