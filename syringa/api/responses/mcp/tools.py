"""Tools of the type `mcp`: the field, its filters, and the tools that the model is offered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.tools import arguments_schema
from syringa.api.responses.schemas import NAME
from syringa.api.responses.tool_definitions import ToolDefinition, can_enforce
from syringa.api.responses.tool_names import ToolKey
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import Tool
from syringa.remote_tools import RemoteServer, RemoteTool, RemoteToolClient, RemoteToolsListed

T = TypeVar("T", bound=msgspec.Struct)

MCP = "mcp"
_MAX_URL, _MAX_HEADERS, _MAX_SERVERS, _MAX_TOOLS = 2048, 64, 16, 1024
_OFFERED_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # the names that MCP recommends
_HEADER_NAME = re.compile(r"[a-zA-Z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\t\x20-\x7e]*[\x21-\x7e])?")
# Headers that the connection and the protocol set themselves.
_OWN_HEADERS = frozenset({"accept", "accept-encoding", "connection", "content-length", "content-type", "host"})
_OWN_HEADERS |= {"keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


class McpToolField(msgspec.Struct, kw_only=True):
    type: str
    server_label: Annotated[str, Meta(pattern=NAME)]
    server_url: Annotated[str, Meta(max_length=_MAX_URL)]
    server_description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: Any = None
    require_approval: Any = None
    connector_id: Any = None
    tunnel_id: Any = None


class ToolFilterField(msgspec.Struct, kw_only=True):
    tool_names: list[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: RemoteTool) -> bool:
        """Return whether a tool has all that the filter asks for."""
        return (self.tool_names is None or tool.name in self.tool_names) and (
            self.read_only is None or tool.read_only == self.read_only
        )


class ApprovalFilterField(msgspec.Struct, kw_only=True):
    always: Any = None
    never: Any = None


@dataclass(frozen=True, kw_only=True)
class ApprovalPolicy:
    """The field `require_approval`: a rule for all tools, or filters."""

    default: bool
    always: ToolFilterField | None = None
    never: ToolFilterField | None = None

    def requires(self, tool: RemoteTool) -> bool:
        if self.always is not None and self.always.matches(tool):
            return True
        if self.never is not None and self.never.matches(tool):
            return False
        return self.default


@dataclass(frozen=True, kw_only=True)
class McpServerTool:
    """A validated element of `tools`."""

    path: str
    server: RemoteServer
    description: str
    allowed: ToolFilterField
    approval: ApprovalPolicy


@dataclass(frozen=True, kw_only=True)
class McpTools:
    """The MCP servers of a request: their tools for the model, and the lists that were fetched for this response."""

    servers: Mapping[str, RemoteServer] = field(default_factory=dict)  # by label
    definitions: list[ToolDefinition] = field(default_factory=list)
    listed: list[RemoteToolsListed] = field(default_factory=list)
    needs_approval: frozenset[str] = frozenset()  # by the name that the model knows


def is_mcp_server(given: Any) -> bool:
    """Return whether an element of `tools` names an MCP server by its URL; connectors are tools that OpenAI hosts."""
    return isinstance(given, dict) and given.get("type") == MCP and given.get("server_url") is not None


async def read_mcp_tools(
    tools: list[Any] | None,
    client: RemoteToolClient | None,
    known: Mapping[str, list[RemoteTool]],
    ignored: list[str],
) -> McpTools:
    """Return the tools of the MCP servers in `tools`, from `known` lists of the conversation or from the servers.

    `known`: by `server_label`. Tools with names that cannot be called are appended to `ignored`.
    """
    given = {index: each for index, each in enumerate(tools or ()) if is_mcp_server(each)}
    if not given:
        return McpTools()
    read = [read_mcp_server(each, f"tools[{index}]") for index, each in given.items()]
    if client is None:
        raise InvalidRequest(f"{read[0].path}.type: MCP servers are not supported here.", param=f"{read[0].path}.type")
    for each in read:
        await client.check_url(each.server.url, f"{each.path}.server_url")
    servers = {each.server.label: each.server for each in read}
    if len(servers) < len(read):
        raise InvalidRequest("tools: two MCP servers have the same server_label.", param="tools")
    if len(servers) > _MAX_SERVERS:
        raise InvalidRequest(f"tools: at most {_MAX_SERVERS} MCP servers, got {len(servers)}.", param="tools")
    listed = await _list_tools(client, [each for each in read if each.server.label not in known])
    return await asyncio.to_thread(_offer, read, {**known, **listed}, servers, listed, ignored)


async def _list_tools(client: RemoteToolClient, servers: Sequence[McpServerTool]) -> dict[str, list[RemoteTool]]:
    """Return the tools of several servers, by `server_label`. The first failure ends them all."""
    tasks = [asyncio.create_task(client.list_tools(each.server, each.path)) for each in servers]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {each.server.label: tools for each, tools in zip(servers, found, strict=True)}


def _offer(
    given: Sequence[McpServerTool],
    lists: Mapping[str, list[RemoteTool]],
    servers: Mapping[str, RemoteServer],
    listed: Mapping[str, list[RemoteTool]],
    ignored: list[str],
) -> McpTools:
    definitions, needs_approval = [], set()
    for each in given:
        allowed = [tool for tool in lists[each.server.label] if each.allowed.matches(tool)]
        if len(allowed) > _MAX_TOOLS:
            raise InvalidRequest(
                f"{each.path}: the server has {len(allowed)} tools, and at most {_MAX_TOOLS} can be offered; choose"
                " some with allowed_tools.",
                param=each.path,
            )
        for tool in allowed:
            if not _OFFERED_NAME.fullmatch(tool.name):
                ignored.append(f"{each.path} ({tool.name[:100]})")
                continue
            definition = _define(tool, each)
            definitions.append(definition)
            if each.approval.requires(tool):
                needs_approval.add(definition.tool.name)
    return McpTools(
        servers=servers,
        definitions=definitions,
        listed=[RemoteToolsListed(label, tools) for label, tools in listed.items()],
        needs_approval=frozenset(needs_approval),
    )


def read_mcp_server(given: Any, path: str, ignored: list[str] | None = None) -> McpServerTool:
    """Validate an element of `tools`. Error messages do not repeat values, which may be secret."""
    read = convert(given, McpToolField, path=path, ignored=ignored)
    for name in ("connector_id", "tunnel_id"):
        if getattr(read, name) is not None:
            raise InvalidRequest(f"{path}.{name}: cannot be combined with server_url.", param=f"{path}.{name}")
    return McpServerTool(
        path=path,
        server=RemoteServer(label=read.server_label, url=read.server_url, headers=_headers(read, path)),
        description=read.server_description or "",
        allowed=_allowed_tools(read.allowed_tools, f"{path}.allowed_tools"),
        approval=_approval(read.require_approval, f"{path}.require_approval"),
    )


def mcp_tool_echo(given: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as the response repeats it: without secrets, and of the URL the scheme and host only."""
    url = given.get("server_url")
    shown = ("server_label", "connector_id", "server_description", "allowed_tools", "require_approval")
    echo = {"type": MCP, "server_label": "", **{name: given[name] for name in shown if given.get(name) is not None}}
    if isinstance(url, str) and (origin := re.match(r"https?://[^/?#@]+(?=[/?#]|$)", url, re.IGNORECASE)):
        echo["server_url"] = f"{origin[0]}/"
    return echo


def _headers(read: McpToolField, path: str) -> dict[str, str]:
    headers = dict(read.headers or {})
    path += ".headers"
    if len(headers) > _MAX_HEADERS:
        raise InvalidRequest(f"{path}: at most {_MAX_HEADERS}, got {len(headers)}.", param=path)
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidRequest(f"{path}: a name is not that of an HTTP header.", param=path)
        if name.lower() in _OWN_HEADERS or name.lower().startswith("mcp-"):
            raise InvalidRequest(f"{path}.{name}: this header cannot be set.", param=f"{path}.{name}")
        if value and not _HEADER_VALUE.fullmatch(value):
            raise InvalidRequest(f"{path}.{name}: expected printable ASCII characters.", param=f"{path}.{name}")
    if read.authorization is not None:
        path = path.removesuffix("headers") + "authorization"
        if not _HEADER_VALUE.fullmatch(read.authorization):
            raise InvalidRequest(f"{path}: expected printable ASCII characters.", param=path)
        if any(name.lower() == "authorization" for name in headers):
            raise InvalidRequest(f"{path}: cannot be combined with the header of that name.", param=path)
        headers["Authorization"] = f"Bearer {read.authorization}"
    return headers


def _allowed_tools(given: Any, path: str) -> ToolFilterField:
    if given is None:
        return ToolFilterField()
    if isinstance(given, list):
        given = {"tool_names": given}
    return _convert_filter(given, ToolFilterField, path)


def _approval(given: Any, path: str) -> ApprovalPolicy:
    match given:
        case None | "always":
            return ApprovalPolicy(default=True)
        case "never":
            return ApprovalPolicy(default=False)
        case dict():
            read = _convert_filter(given, ApprovalFilterField, path)
            filters: dict[Literal["always", "never"], ToolFilterField | None] = {"always": None, "never": None}
            for name in filters:
                value = getattr(read, name)
                if value is not None:
                    filters[name] = found = _convert_filter(value, ToolFilterField, f"{path}.{name}")
                    if found == ToolFilterField():
                        raise InvalidRequest(
                            f"{path}.{name}: expected tool_names or read_only.", param=f"{path}.{name}"
                        )
            # Where only the tools that require approval are named, the others do not.
            default = filters["always"] is None or filters["never"] is not None
            return ApprovalPolicy(default=default, **filters)
    raise InvalidRequest(f"{path}: expected always, never or an object with filters.", param=path)


def _convert_filter(given: Any, wire: type[T], path: str) -> T:
    """Convert a filter. An unknown field is an error: without it, the filter would allow more than the client wants."""
    unknown: list[str] = []
    read = convert(given, wire, path=path, ignored=unknown)
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: unknown field of a filter.", param=unknown[0])
    return read


def _define(tool: RemoteTool, given: McpServerTool) -> ToolDefinition:
    """Return a tool for the model. A schema that cannot be enforced, or not be read, is not enforced."""
    key = ToolKey(MCP, tool.name, given.server.label)
    parameters: dict[str, Any] = tool.input_schema
    try:
        arguments_schema(parameters, given.path, strict=False, ignored=[])
    except (InvalidRequest, RecursionError):
        parameters = {"type": "object"}
    described = Tool(name=key.prompt_name, description=tool.description or None, parameters=parameters, path=given.path)
    described = msgspec.structs.replace(described, strict=can_enforce(described, given.path), best_effort=True)
    return ToolDefinition(key=key, tool=described, path=given.path, echo={}, namespace_description=given.description)
