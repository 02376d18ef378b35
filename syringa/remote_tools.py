"""Tools on MCP servers: values and the client's interface, between the Responses API and `syringa.service.mcp`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, kw_only=True)
class RemoteServer:
    """An MCP server that a request names. `url` and `headers` may have secrets, and are left out of its repr."""

    label: str
    url: str = field(repr=False)
    headers: dict[str, str] = field(default_factory=dict, repr=False)


class RemoteTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as its server describes it."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None

    @property
    def read_only(self) -> bool:
        return (self.annotations or {}).get("readOnlyHint") is True


class RemoteResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call: the output of the tool, or an error with a message for the model.

    `error` is in the form of the API: an object with the type `mcp_protocol_error`, `mcp_tool_execution_error` or
    `http_error`.
    """

    output: str | None = None
    error: dict[str, Any] | None = None
    error_message: str = ""

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"Error: {self.error_message}" if self.error is not None else self.output or ""


class RemoteToolsListed(msgspec.Struct, frozen=True):
    """An event of a response: the server has listed the tools of an MCP server."""

    server: str
    tools: list[RemoteTool]


class RemoteCallFinished(msgspec.Struct, frozen=True):
    """An event of a response: a call on an MCP server has ended. `id` is that of its `ToolCallStart`."""

    id: str
    result: RemoteResult


class RemoteConnection(Protocol):
    """A connection to one server, opened by its first call."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> RemoteResult:
        """Call a tool. Does not raise: what goes wrong is the result, so that the model can react to it."""
        ...

    def close(self) -> None:
        """End the connection, without waiting for it. A running call is cancelled."""
        ...


class RemoteToolClient(Protocol):
    """Access to the MCP servers that the operator allows."""

    async def check_url(self, url: str, param: str) -> None:
        """Raise `InvalidRequest` for a server that requests may not use. `param`: the field of the URL."""
        ...

    async def list_tools(self, server: RemoteServer, param: str) -> list[RemoteTool]:
        """Return the tools of a server. Raises `FailedDependency` if it does not answer as it should."""
        ...

    def connect(self, server: RemoteServer) -> RemoteConnection: ...
