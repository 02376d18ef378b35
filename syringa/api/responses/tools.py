"""The `tools` and `tool_choice` fields of responses: which tools the model is offered, and which it may call."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.hosted_tools import HOSTED_TOOLS, UnsupportedTools, missing_tool, report_hosted_tool
from syringa.api.fields.tools import MAX_TOOLS, ToolChoice, ToolRequest, build_tool_request
from syringa.api.responses.mcp.tools import MCP, is_mcp_server, mcp_tool_echo, read_mcp_server
from syringa.api.responses.tool_definitions import (
    TOOL_SEARCH,
    ToolDefinition,
    ToolDefinitionReader,
    ToolTypeField,
)
from syringa.api.responses.tool_names import ToolKey
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import Tool, ToolUse

MAX_OFFERED_TOOLS = 1024


class NamedToolField(msgspec.Struct, kw_only=True):
    type: str
    name: str
    namespace: str | None = None


class McpChoiceField(msgspec.Struct, kw_only=True):
    type: str
    server_label: str
    name: str | None = None


class AllowedToolsChoice(msgspec.Struct, kw_only=True):
    type: str
    mode: Literal["auto", "required"]
    tools: list[Any]


class ResponseTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a response: for the model, for the writer of its calls, and the field as the response repeats it."""

    request: ToolRequest | None = None
    keys: Mapping[str, ToolKey] = {}  # by the name that the model knows
    echo: list[dict[str, Any]] = []
    echo_of: Mapping[str, dict[str, Any]] = {}  # by the same name

    def mark_unenforced(self, names: Iterable[str]) -> None:
        """Repeat functions as not strict whose schemas turned out not to be enforceable."""
        for name in names:
            if "strict" in (echo := self.echo_of[name]):
                echo["strict"] = False


async def read_response_tools(
    tools: list[Any] | None,
    choice: Any,
    ignored: list[str],
    *,
    parallel: bool,
    constrain_arguments: bool,
    open_mode: bool,
    added: Sequence[ToolDefinition] = (),
    unsupported: UnsupportedTools = "ignore",
) -> ResponseTools:
    """Validate `tools` and `tool_choice`. The paths of fields that are not honored are appended to `ignored`.

    `added` are the tools that items of the conversation add, such as those that a tool search has found, and those of
    MCP servers.
    `constrain_arguments` and `unsupported` are those of `syringa.api.fields.tools.read_tools`.
    """
    if choice is not None and not isinstance(choice, str | dict):
        raise InvalidRequest("tool_choice: expected a string or an object.", param="tool_choice")
    if not tools and not added:
        if choice not in (None, "none", "auto"):
            raise missing_tool(hosted=False)
        return ResponseTools()
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(tools or ())}.", param="tools")

    def read_mcp(given: Any, path: str) -> dict[str, Any]:
        if is_mcp_server(given):
            read_mcp_server(given, path, ignored)
        else:
            report_hosted_tool(MCP, path, unsupported, ignored)
        return mcp_tool_echo(given)

    reader = ToolDefinitionReader(ignored, open_mode=open_mode, unsupported=unsupported, others={MCP: read_mcp})
    try:
        return await asyncio.to_thread(
            _read, reader, tools or [], added, choice, ignored, parallel, constrain_arguments
        )
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply.", param="tools") from None


def _read(
    reader: ToolDefinitionReader,
    tools: list[Any],
    added: Sequence[ToolDefinition],
    choice: Any,
    ignored: list[str],
    parallel: bool,
    constrain_arguments: bool,
) -> ResponseTools:
    echo = [reader.read(given, f"tools[{index}]") for index, given in enumerate(tools)]
    offered = _offered(reader.definitions, added, ignored)
    request = build_tool_request(
        _described(offered.values()),
        _ChoiceReader(offered, ignored).read(choice),
        ignored,
        parallel=parallel,
        constrain_arguments=constrain_arguments,
    )
    if request is not None:
        request = msgspec.structs.replace(request, use=_with_grammars(request.use, offered))
    return ResponseTools(
        request=request,
        keys={name: each.key for name, each in offered.items()},
        echo=[each for each in echo if each is not None],
        echo_of={name: each.echo for name, each in offered.items()},
    )


def _offered(
    given: Sequence[ToolDefinition], added: Sequence[ToolDefinition], ignored: list[str]
) -> dict[str, ToolDefinition]:
    """Return the tools that the model may see, by the name that it knows. An added tool replaces a given one.

    Where no tool search could find deferred tools, they are offered at once.
    """
    known: dict[str, ToolDefinition] = {}
    for each in given:
        if each.tool.name in known:
            raise InvalidRequest(
                f"{each.path}.name: duplicate tool name {each.tool.name!r}.", param=f"{each.path}.name"
            )
        known[each.tool.name] = each
    known |= {each.tool.name: each for each in added}
    if any(each.key.kind == TOOL_SEARCH for each in known.values()):
        known = {name: each for name, each in known.items() if not each.deferred}
    else:
        ignored += [f"{each.path}.defer_loading" for each in given if each.deferred]
    if len(known) > MAX_OFFERED_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_OFFERED_TOOLS} in all namespaces, got {len(known)}.", param="tools")
    return known


def _described(offered: Iterable[ToolDefinition]) -> list[Tool]:
    """Return the tools for the prompt. The first tool of a namespace describes the namespace too."""
    described: set[str | None] = {None}
    tools = []
    for each in offered:
        tool, namespace = each.tool, each.key.namespace
        if namespace not in described and each.namespace_description:
            described.add(namespace)
            note = f"{namespace}: {each.namespace_description}"
            text = f"{tool.description}\n{note}" if tool.description else note
            tool = msgspec.structs.replace(tool, description=text)
        tools.append(tool)
    return tools


def _with_grammars(use: ToolUse, offered: Mapping[str, ToolDefinition]) -> ToolUse:
    """Return the tools with the schemas of custom tools that have a grammar.

    Schemas of MCP servers are not the client's, which could not correct one that cannot be enforced.
    """
    tools = []
    for tool in use.tools:
        if offered[tool.name].key.kind == MCP:
            tool = msgspec.structs.replace(tool, best_effort=True)
        schema = offered[tool.name].grammar_schema
        tools.append(tool if schema is None else msgspec.structs.replace(tool, schema=schema))
    return msgspec.structs.replace(use, tools=tools)


class _ChoiceReader:
    """Reads `tool_choice`, given the tools that are offered, by the name that the model knows."""

    def __init__(self, offered: Mapping[str, ToolDefinition], ignored: list[str]) -> None:
        self._offered, self._ignored = offered, ignored

    def read(self, choice: Any) -> ToolChoice:
        names = frozenset(self._offered)
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
            return ToolChoice(allowed.mode, self._allowed(allowed.tools, "tool_choice.tools"))
        return ToolChoice("required", self._named(choice, "tool_choice", ("function", "custom", MCP)), named=True)

    def _allowed(self, given: list[Any], path: str) -> frozenset[str]:
        if not given:
            raise InvalidRequest(f"{path}: expected at least one tool.", param=path)
        kinds = ("function", "custom", "namespace", TOOL_SEARCH, MCP)
        return frozenset(
            name for index, each in enumerate(given) for name in self._named(each, f"{path}[{index}]", kinds)
        )

    def _named(self, given: Any, path: str, kinds: Collection[str]) -> frozenset[str]:
        """Return the names of the tools that an element of the choice names."""
        kind = convert(given, ToolTypeField, path=path).type
        if kind not in kinds:
            hosted = kind in HOSTED_TOOLS
            reason = f"this server has no {kind} tool" if hosted else f"expected {', '.join(kinds)}, not {kind!r}"
            raise InvalidRequest(f"{path}.type: {reason}.", param=f"{path}.type")
        if kind == TOOL_SEARCH:
            names = self._matching(kind)
            if not names:
                raise InvalidRequest(f"{path}.type: no tool_search that the client executes in tools.", param=path)
            return names
        if kind == MCP:
            chosen = convert(given, McpChoiceField, path=path, ignored=self._ignored)
            names = self._matching(kind, chosen.name, chosen.server_label)
            return names or self._unknown(kind, chosen.name or chosen.server_label, path)
        field = convert(given, NamedToolField, path=path, ignored=self._ignored)
        if kind == "namespace":
            names = frozenset(name for name, each in self._offered.items() if each.key.namespace == field.name)
            return names or self._unknown(kind, field.name, path)
        names = self._matching(kind, field.name, field.namespace)
        if field.namespace is None and (own := names & {field.name}):
            names = own  # a tool without a namespace comes first
        if len(names) > 1:
            raise InvalidRequest(
                f"{path}.namespace: several tools have the name {field.name!r} ({', '.join(sorted(names))}).",
                param=f"{path}.namespace",
            )
        return names or self._unknown(kind, field.name, path)

    def _matching(self, kind: str, name: str | None = None, namespace: str | None = None) -> frozenset[str]:
        return frozenset(
            known
            for known, each in self._offered.items()
            if each.key.kind == kind
            and name in (None, each.key.name)
            and (namespace is None or namespace == each.key.namespace)
        )

    def _unknown(self, kind: str, name: str, path: str) -> frozenset[str]:
        if kind == "namespace":
            known = {each.key.namespace for each in self._offered.values() if each.key.namespace is not None}
        else:
            known = {each.tool.name for each in self._offered.values() if each.key.kind == kind}
        listed = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(f"{path}.name: no {kind} tool {name!r} in tools ({listed}).", param=f"{path}.name")
