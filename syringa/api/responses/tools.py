"""Flat `tools` and `tool_choice`: functions, and custom tools, whose input is free text or fits a grammar."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.constraints import check_grammar
from syringa.api.fields.tools import (
    MAX_TOOLS,
    Choice,
    FunctionField,
    ToolRequest,
    arguments_schema,
    offer,
    read_function,
)
from syringa.api.responses.custom_input import parameters
from syringa.api.responses.lark_pattern import lark_pattern
from syringa.api.responses.schemas import NAME
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.compile_pool import in_workshop
from syringa.prompt.grammar.schema import enforceable
from syringa.types import Grammar

_TEXT = {"type": "text"}


class TypeField(msgspec.Struct, kw_only=True):
    type: str


class FlatFunctionField(FunctionField, kw_only=True):
    type: str


class CustomField(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=NAME)]
    description: str | None = None
    format: Any = None


class FormatField(msgspec.Struct, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class NamedField(msgspec.Struct, kw_only=True):
    type: str
    name: str


class AllowedField(msgspec.Struct, kw_only=True):
    type: str
    mode: Literal["auto", "required"]
    tools: list[Any]


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """A response's tools: what the model may do with them, which are custom, and how they are repeated."""

    request: ToolRequest | None = None
    custom: frozenset[str] = frozenset()
    echo: list[dict[str, Any]] = []


async def read_tools(
    tools: list[Any] | None, choice: Any, ignored: list[str], *, parallel: bool, hold: bool, open_mode: bool
) -> Tools:
    """What is not honoured of them is added to `ignored`. `hold`: as in chat."""
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequest("tool_choice: expected a string or an object.", param="tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a tool, and there are no tools.", param="tool_choice")
        return Tools()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools)}.", param="tools")
    try:
        # Schemas are compiled to see whether they can be; other requests must not wait for it.
        reader = _Reader(ignored, open_mode)
        return await in_workshop(lambda: reader.read(tools, choice, parallel, hold), "tools")
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply.", param="tools") from None


class _Reader:
    def __init__(self, ignored: list[str], open_mode: bool) -> None:
        self._ignored, self._open_mode = ignored, open_mode
        self._tools: dict[str, Tool] = {}
        self._types: dict[str, str] = {}
        self._echo: list[dict[str, Any]] = []
        self._patterned: dict[str, dict[str, Any]] = {}  # what the calls of custom tools with a grammar are held to

    def read(self, tools: list[Any], choice: Any, parallel: bool, hold: bool) -> Tools:
        for index, given in enumerate(tools):
            path = f"tools[{index}]"
            tool, kind = self._tool(given, path)
            if tool.name in self._tools:
                raise InvalidRequest(f"{path}.name: there are two tools named {tool.name!r}.", param=f"{path}.name")
            self._tools[tool.name], self._types[tool.name] = tool, kind
        chosen = self._choice(choice)
        request = offer(self._tools.values(), chosen, self._ignored, parallel=parallel, hold=hold, path="parameters")
        if request is not None and self._patterned:
            request = msgspec.structs.replace(request, use=self._with_patterns(request.use))
        custom = frozenset(name for name, kind in self._types.items() if kind == "custom")
        return Tools(request=request, custom=custom, echo=self._echo)

    def _tool(self, given: Any, path: str) -> tuple[Tool, str]:
        kind = convert(given, TypeField, path=path).type
        if kind == "function":
            return self._function(given, path), kind
        if kind == "custom" and not self._open_mode:
            return self._custom(given, path), kind
        served = "functions are" if self._open_mode else "function and custom tools are"
        raise InvalidRequest(f"{path}.type: only {served} served here, not {kind!r}.", param=f"{path}.type")

    def _function(self, given: Any, path: str) -> Tool:
        field = convert(given, FlatFunctionField, path=path, ignored=self._ignored)
        tool = read_function(field, path)
        if field.strict is None:
            tool = msgspec.structs.replace(tool, strict=_can_hold(tool, f"{path}.parameters"))
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
        field = convert(given, CustomField, path=path, ignored=self._ignored)
        form = convert(_TEXT if field.format is None else field.format, FormatField, path=f"{path}.format")
        described = {} if field.description is None else {"description": field.description}
        shape = {name: value for name, value in msgspec.to_builtins(form).items() if value is not None}
        self._echo.append({"type": "custom", "name": field.name, **described, "format": shape})
        # A custom tool is told of as a function of one text, and its call is always held to that. The model is shown
        # the grammar as the client wrote it.
        about = None
        if form.type == "grammar":
            self._patterned[field.name] = _patterned(form, f"{path}.format")
            about = f"A text that fits this {form.syntax} grammar:\n{form.definition}"
        return Tool(name=field.name, description=field.description, parameters=parameters(about), strict=True)

    def _with_patterns(self, use: ToolUse) -> ToolUse:
        tools = [
            msgspec.structs.replace(tool, schema=self._patterned.get(tool.name, tool.schema)) for tool in use.tools
        ]
        return msgspec.structs.replace(use, tools=tools)

    def _choice(self, choice: Any) -> Choice:
        names = frozenset(self._tools)
        match choice:
            case None:
                return Choice("auto", names)
            case "none" | "auto" | "required":
                return Choice(choice, names)
            case str():
                raise InvalidRequest("tool_choice: expected none, auto, required or an object.", param="tool_choice")
        kind = convert(choice, TypeField, path="tool_choice").type
        if kind == "allowed_tools":
            allowed = convert(choice, AllowedField, path="tool_choice", ignored=self._ignored)
            return Choice(allowed.mode, self._allowed(allowed.tools, "tool_choice.tools"))
        return Choice("required", frozenset({self._named(choice, "tool_choice")}), named=True)

    def _allowed(self, given: list[Any], path: str) -> frozenset[str]:
        if not given:
            raise InvalidRequest(f"{path}: expected at least one.", param=path)
        return frozenset(self._named(each, f"{path}[{index}]") for index, each in enumerate(given))

    def _named(self, given: Any, path: str) -> str:
        kind = convert(given, TypeField, path=path).type
        if kind not in ("function", "custom"):
            also = ", custom or allowed_tools" if path == "tool_choice" else " or custom"
            raise InvalidRequest(f"{path}.type: expected function{also}, not {kind!r}.", param=f"{path}.type")
        name = convert(given, NamedField, path=path, ignored=self._ignored).name
        if self._types.get(name) != kind:
            known = ", ".join(each for each, type_ in self._types.items() if type_ == kind) or "none"
            raise InvalidRequest(
                f"{path}.name: there is no {kind} tool {name!r} among the tools ({known}).", param=f"{path}.name"
            )
        return name


def _can_hold(tool: Tool, path: str) -> bool:
    """Functions are strict in this API unless they say otherwise, or have a schema that cannot be enforced."""
    try:
        arguments_schema(tool.parameters or {}, path, strict=True, ignored=[])
    except InvalidRequest:
        return False
    return True


def _patterned(form: FormatField, path: str) -> dict[str, Any]:
    """The schema of a call whose input fits a grammar."""
    for name in ("syntax", "definition"):
        if getattr(form, name) is None:
            raise InvalidRequest(f"{path}.{name}: a grammar has to have it.", param=f"{path}.{name}")
    definition = form.definition or ""
    path += ".definition"
    pattern = definition if form.syntax == "regex" else lark_pattern(definition, path)
    schema = parameters(pattern=pattern)
    kept, left_out, _ = enforceable(schema)
    if left_out:
        raise InvalidRequest(f"{path}: look-around and references back cannot be enforced.", param=path)
    check_grammar(Grammar("json_schema", json.dumps(kept)), path)
    return schema
