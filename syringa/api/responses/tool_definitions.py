"""Definitions of tools, in `tools` and in the output of a tool search: functions, custom tools, and groups of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.hosted_tools import HOSTED_TOOLS, UnsupportedTools, hosted_tool_echo, report_hosted_tool
from syringa.api.fields.tools import MAX_TOOLS, FunctionField, arguments_schema, read_function
from syringa.api.responses.custom_input import custom_tool_parameters
from syringa.api.responses.lark_to_regex import lark_to_regex
from syringa.api.responses.schemas import NAME
from syringa.api.responses.tool_names import ToolKey
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import Tool
from syringa.prompt.grammar.schema import enforceable_schema

ToolReader = Callable[[Any, str], dict[str, Any] | None]
"""Reads a tool, given its path. Returns it as the response repeats it, or None if its schema does not allow that."""

TOOL_SEARCH = "tool_search"
_TEXT = {"type": "text"}
_SEARCH_DESCRIPTION = "Searches for more tools. Those that it finds can be called afterwards."
_SEARCH_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tools have to do."}},
    "required": ["query"],
    "additionalProperties": False,
}


class ToolTypeField(msgspec.Struct, kw_only=True):
    type: str


class FunctionToolField(FunctionField, kw_only=True):
    type: str
    defer_loading: bool = False


class CustomToolField(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=NAME)]
    description: str | None = None
    format: Any = None
    defer_loading: bool = False


class CustomFormatField(msgspec.Struct, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class NamespaceToolField(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=NAME)]
    description: str = ""
    tools: Annotated[list[Any], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolSearchField(msgspec.Struct, kw_only=True):
    type: str
    execution: Literal["server", "client"] = "server"
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model can call. `tool` has the name by which the model knows it.

    `echo` is the tool as the response repeats it. `grammar_schema` is the schema of the arguments of a custom tool with
    a grammar, which is too technical for the prompt. A deferred tool is not offered until a tool search has found it.
    """

    key: ToolKey
    tool: Tool
    path: str
    echo: dict[str, Any]
    grammar_schema: dict[str, Any] | None = None
    deferred: bool = False
    namespace_description: str = ""


class ToolDefinitionReader:
    """Reads definitions of tools of any type, and collects those that the model can call.

    The paths of fields that are not honored, and hosted tools, are appended to `ignored`. A `stored` tool was validated
    before. `open_mode`: Open Responses has functions only.
    """

    def __init__(
        self,
        ignored: list[str],
        *,
        open_mode: bool = False,
        unsupported: UnsupportedTools = "ignore",
        stored: bool = False,
        others: Mapping[str, ToolReader] | None = None,
    ) -> None:
        """`others` reads tools of types that are not known here."""
        self.definitions: list[ToolDefinition] = []
        self._ignored, self._open_mode, self._unsupported, self._stored = ignored, open_mode, unsupported, stored
        self._readers: dict[str, ToolReader] = {"function": self._function}
        if not open_mode:
            self._readers |= {"custom": self._custom, "namespace": self._namespace, TOOL_SEARCH: self._tool_search}
            self._readers |= others or {}

    def read(self, given: Any, path: str) -> dict[str, Any] | None:
        """Read a tool. Returns it as the response repeats it, or None if its schema does not allow that."""
        kind = convert(given, ToolTypeField, path=path).type
        if (reader := self._readers.get(kind)) is not None:
            return reader(given, path)
        if kind in HOSTED_TOOLS or kind == TOOL_SEARCH:
            return self._hosted(given, path)
        supported = ", ".join((*self._readers, *HOSTED_TOOLS))
        raise InvalidRequest(f"{path}.type: supported tools are {supported}, not {kind!r}.", param=f"{path}.type")

    def _hosted(self, given: dict[str, Any], path: str) -> dict[str, Any] | None:
        report_hosted_tool(given["type"], path, self._unsupported, self._ignored)
        return None if self._open_mode else hosted_tool_echo(given)

    def _function(self, given: Any, path: str) -> dict[str, Any]:
        return self._add_function(given, path).echo

    def _add_function(self, given: Any, path: str, namespace: NamespaceToolField | None = None) -> ToolDefinition:
        field = convert(given, FunctionToolField, path=path, ignored=self._ignored)
        tool = read_function(field, path)
        if field.strict is None or self._stored:
            strict = field.strict is not False and can_enforce(tool, tool.path)
            tool = msgspec.structs.replace(tool, strict=strict, best_effort=True)
        echo: dict[str, Any] = {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        return self._add("function", tool, path, echo, namespace, deferred=field.defer_loading)

    def _custom(self, given: Any, path: str) -> dict[str, Any]:
        return self._add_custom(given, path).echo

    def _add_custom(self, given: Any, path: str, namespace: NamespaceToolField | None = None) -> ToolDefinition:
        field = convert(given, CustomToolField, path=path, ignored=self._ignored)
        format = convert(_TEXT if field.format is None else field.format, CustomFormatField, path=f"{path}.format")
        described = {} if field.description is None else {"description": field.description}
        format_echo = {name: value for name, value in msgspec.to_builtins(format).items() if value is not None}
        echo = {"type": "custom", "name": field.name, **described, "format": format_echo}
        # The model sees a custom tool as a function with one text parameter, described by the client's grammar.
        grammar_schema, description = None, None
        if format.type == "grammar":
            grammar_schema = _grammar_schema(format, f"{path}.format")
            description = f"A text that matches this {format.syntax} grammar:\n{format.definition}"
        tool = Tool(
            name=field.name,
            description=field.description,
            parameters=custom_tool_parameters(description),
            strict=True,
            path=f"{path}.format.definition" if grammar_schema is not None else path,
        )
        return self._add(
            "custom", tool, path, echo, namespace, deferred=field.defer_loading, grammar_schema=grammar_schema
        )

    def _namespace(self, given: Any, path: str) -> dict[str, Any]:
        field = convert(given, NamespaceToolField, path=path, ignored=self._ignored)
        readers = {"function": self._add_function, "custom": self._add_custom}
        tools = []
        for index, each in enumerate(field.tools):
            where = f"{path}.tools[{index}]"
            kind = convert(each, ToolTypeField, path=where).type
            if kind not in readers:
                raise InvalidRequest(
                    f"{where}.type: a namespace has tools of type function and custom, not {kind!r}.",
                    param=f"{where}.type",
                )
            tools.append(readers[kind](each, where, field).echo)
        return {"type": "namespace", "name": field.name, "description": field.description, "tools": tools}

    def _tool_search(self, given: Any, path: str) -> dict[str, Any]:
        field = convert(given, ToolSearchField, path=path, ignored=self._ignored)
        echo = {name: value for name, value in msgspec.to_builtins(field).items() if value is not None}
        if field.execution == "server":
            report_hosted_tool(TOOL_SEARCH, path, self._unsupported, self._ignored)
            return echo
        function = FunctionField(
            name=TOOL_SEARCH,
            description=field.description or _SEARCH_DESCRIPTION,
            parameters=_SEARCH_PARAMETERS if field.parameters is None else field.parameters,
        )
        tool = read_function(function, path)
        tool = msgspec.structs.replace(tool, strict=can_enforce(tool, tool.path), best_effort=True)
        self._add(TOOL_SEARCH, tool, path, echo, None)
        return echo

    def _add(
        self,
        kind: str,
        tool: Tool,
        path: str,
        echo: dict[str, Any],
        namespace: NamespaceToolField | None,
        *,
        deferred: bool = False,
        grammar_schema: dict[str, Any] | None = None,
    ) -> ToolDefinition:
        if deferred:
            echo["defer_loading"] = True
        key = ToolKey(kind, tool.name, None if namespace is None else namespace.name)
        definition = ToolDefinition(
            key=key,
            tool=msgspec.structs.replace(tool, name=key.prompt_name),
            path=path,
            echo=echo,
            grammar_schema=grammar_schema,
            deferred=deferred,
            namespace_description="" if namespace is None else namespace.description,
        )
        self.definitions.append(definition)
        return definition


def can_enforce(tool: Tool, path: str) -> bool:
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
