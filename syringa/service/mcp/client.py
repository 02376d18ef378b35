"""Access to MCP servers: which ones requests may use, their lists of tools, and connections for calls."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from syringa.errors import FailedDependency, InvalidRequest
from syringa.remote_tools import RemoteConnection, RemoteServer, RemoteTool
from syringa.service.mcp.hosts import AllowedHosts

if TYPE_CHECKING:
    from syringa.service.mcp.connection import McpConnection

_CLOSE_SECONDS = 1.0
_MAX_PORT = 65535
_MAX_SHOWN_HOST = 200


class McpClient:
    """One per process. `close` it to end all connections."""

    def __init__(self, hosts: Sequence[str], *, timeout: float, max_bytes: int) -> None:
        """The settings `mcp_hosts`, `mcp_timeout` and `mcp_max_bytes`. Raises `ConfigError`."""
        self._hosts = AllowedHosts(hosts)
        self._timeout, self._max_bytes = timeout, max_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    async def check_url(self, url: str, param: str) -> None:
        """Raise `InvalidRequest` for a server that requests may not use. `param`: the field of the URL."""
        if not self._hosts:
            raise InvalidRequest(
                f"{param}: this server connects to no MCP servers; its operator can allow hosts with the setting"
                " mcp_hosts.",
                param=param,
            )
        try:
            await asyncio.to_thread(importlib.import_module, "syringa.service.mcp.connection")
        except ImportError:
            raise InvalidRequest(
                f"{param}: this server was installed without MCP; its operator can add it with pip install"
                " 'syringa[mcp]'.",
                param=param,
            ) from None
        import httpx2

        try:
            parsed = httpx2.URL(url)
            scheme, host, port = parsed.scheme, parsed.host, parsed.port
        except (httpx2.InvalidURL, ValueError):
            raise InvalidRequest(f"{param}: this is not a URL.", param=param) from None
        if scheme not in ("http", "https") or not host or parsed.userinfo or not 0 < (port or 80) <= _MAX_PORT:
            raise InvalidRequest(
                f"{param}: expected an http or https URL with a host and a valid port, and without a user name.",
                param=param,
            )
        if not self._hosts.allows(scheme, host, port):
            raise InvalidRequest(
                f"{param}: the host {host[:_MAX_SHOWN_HOST]!r} is not one of those that this server's operator allows"
                " (mcp_hosts).",
                param=param,
            )

    async def list_tools(self, server: RemoteServer, param: str) -> list[RemoteTool]:
        """Return the tools of a server. Raises `FailedDependency` if it does not answer as it should."""
        from syringa.service.mcp.connection import McpFailure

        connection = self._connect(server)
        try:
            return await connection.list_tools()
        except McpFailure as failure:
            raise FailedDependency(failure.message, param=param, code=failure.error["type"]) from None
        finally:
            connection.close()

    def connect(self, server: RemoteServer) -> RemoteConnection:
        return self._connect(server)

    def _connect(self, server: RemoteServer) -> McpConnection:
        from syringa.service.mcp.connection import McpConnection

        return McpConnection(server, self._hosts, timeout=self._timeout, max_bytes=self._max_bytes, tasks=self._tasks)

    async def close(self) -> None:
        for _ in range(2):  # the first cancellation lets a connection tell its server
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
