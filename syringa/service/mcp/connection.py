"""Connections to MCP servers, with the official client library."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx2
import msgspec
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ContentBlock, EmbeddedResource, Implementation, TextContent, TextResourceContents
from pydantic import ValidationError

from syringa.remote_tools import RemoteResult, RemoteServer, RemoteTool
from syringa.service.mcp.hosts import AllowedHosts
from syringa.service.mcp.transport import ForbiddenServer, GuardedTransport, ssl_context
from syringa.version import installed_version

T = TypeVar("T")
_Operation = Callable[[Client], Awaitable[Any]]
_Work = tuple[_Operation, asyncio.Future[Any]]

MAX_PAGES = 16  # of a list of tools
_CLOSE_SECONDS = 5.0  # for telling the server that its session ends
_MAX_MESSAGE = 1000  # characters of a server's error message
_BAD_GATEWAY, _GATEWAY_TIMEOUT = 502, 504
_INTERNAL_ERROR = -32603  # of JSON-RPC

# The library logs messages, session ids and tracebacks of what servers of clients do wrong.
for _name in ("mcp", "client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class McpFailure(Exception):
    """A server did not answer as it should. `error` describes it in the form of the API."""

    def __init__(self, message: str, error: dict[str, Any]) -> None:
        super().__init__(message)
        self.message, self.error = message, error


class McpConnection:
    """A session with one MCP server, which its first operation opens.

    It is held by a task of its own, because the library's scopes of cancellation must be left in the task that entered
    them, and because its failures cancel that task.
    """

    def __init__(
        self,
        server: RemoteServer,
        hosts: AllowedHosts,
        *,
        timeout: float,
        max_bytes: int,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """`timeout`: seconds for one operation; 0: no limit. `tasks` holds the task until it has ended."""
        self._server, self._hosts = server, hosts
        self._timeout, self._max_bytes, self._tasks = timeout, max_bytes, tasks
        self._queue: asyncio.Queue[_Work | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._transport: GuardedTransport | None = None
        self._busy = False

    async def list_tools(self) -> list[RemoteTool]:
        """Raises `McpFailure`."""
        tools = await self._run(_list_tools)
        try:
            msgspec.json.encode(tools)
        except (UnicodeEncodeError, RecursionError):  # half of a surrogate pair
            raise self._describe(ValueError("its list of tools cannot be written as JSON")) from None
        return tools

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> RemoteResult:
        async def call(client: Client) -> CallToolResult:
            return await client.call_tool(name, arguments)

        try:
            return _to_result(await self._run(call))
        except McpFailure as failure:
            return RemoteResult(error=failure.error, error_message=failure.message)

    def close(self) -> None:
        """End the session, without waiting for it. A running operation is cancelled, a later one opens another."""
        task, self._task = self._task, None
        if task is None or task.done():
            return
        if self._busy:
            task.cancel()
        else:
            self._queue.put_nowait(None)
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, task.cancel)

    async def _run(self, operation: Callable[[Client], Awaitable[T]]) -> T:
        if self._task is None or self._task.done():
            self._queue = asyncio.Queue()
            self._task = asyncio.create_task(self._serve(self._queue))
            self._tasks.add(self._task)
            self._task.add_done_callback(self._forget)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((operation, future))
        self._busy = True
        if self._transport is not None:
            self._transport.too_large = False
        task = self._task
        awaited: set[asyncio.Future[Any]] = {future, task}
        await asyncio.wait(awaited, timeout=self._timeout or None, return_when=asyncio.FIRST_COMPLETED)
        if not future.done() and not task.done():
            self.close()
            message = f"it took longer than {self._timeout:g} seconds"
            raise self._failure(message, _http_error(_GATEWAY_TIMEOUT, message))
        self._busy = False
        error = future.exception() if future.done() else None if task.cancelled() else task.exception()
        if error is None and future.done():
            return future.result()
        raise self._describe(error) from error

    async def _serve(self, queue: asyncio.Queue[_Work | None]) -> None:
        """Open the session, and run operations until the queue ends."""
        context = await asyncio.to_thread(ssl_context)  # loading the certificates takes a while
        self._transport = GuardedTransport(self._hosts, max_bytes=self._max_bytes, ssl_context=context)
        # `identity` avoids decompression bombs.
        headers = {"User-Agent": "syringa", **self._server.headers, "Accept-Encoding": "identity"}
        async with httpx2.AsyncClient(
            transport=self._transport,
            headers=headers,
            timeout=httpx2.Timeout(self._timeout or None),
            trust_env=False,
        ) as http:
            streams = streamable_http_client(self._server.url, http_client=http, max_sse_event_size=self._max_bytes)
            async with Client(
                streams, cache=None, client_info=Implementation(name="syringa", version=installed_version())
            ) as client:
                while (work := await queue.get()) is not None:
                    operation, future = work
                    try:
                        result = await operation(client)
                    except Exception as error:
                        if not future.done():
                            future.set_exception(error)
                    else:
                        if not future.done():
                            future.set_result(result)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # has been raised to the caller, or came after it

    def _describe(self, error: BaseException | None) -> McpFailure:
        """Return the failure for what the library raised, or for an end without an error."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        transport = self._transport
        if transport is not None and transport.too_large:
            message = f"its answer has more than {self._max_bytes} bytes (mcp_max_bytes)"
            return self._failure(message, _http_error(_BAD_GATEWAY, message))
        # A redirect that is not followed has a status above 300.
        if isinstance(error, MCPError) and transport is not None and transport.status >= 300:
            message = f"it answered with the HTTP status {transport.status}"
            return self._failure(message, _http_error(transport.status, message))
        if error is None or isinstance(error, httpx2.HTTPError):
            message = "it sent no complete and valid response"
            if isinstance(error, ForbiddenServer):
                message = str(error)
            elif isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                message = "no connection to it could be made"
            return self._failure(message, _http_error(_BAD_GATEWAY, message))
        # What remains are errors that the server reports, and answers that the library rejects.
        code = error.code if isinstance(error, MCPError) else _INTERNAL_ERROR
        message = str(error)[:_MAX_MESSAGE] or type(error).__name__
        if isinstance(error, ValidationError):
            message = "its answer is not a valid MCP message"
        return self._failure(message, {"type": "mcp_protocol_error", "code": code, "message": message})

    def _failure(self, message: str, error: dict[str, Any]) -> McpFailure:
        return McpFailure(f"The MCP server {self._server.label!r} failed: {message}.", error)


def _http_error(code: int, message: str) -> dict[str, Any]:
    return {"type": "http_error", "code": code, "message": message}


async def _list_tools(client: Client) -> list[RemoteTool]:
    tools: list[RemoteTool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            hints = None
            if tool.annotations is not None:
                hints = tool.annotations.model_dump(by_alias=True, exclude_none=True)
            tools.append(
                RemoteTool(
                    name=tool.name, description=tool.description, input_schema=tool.input_schema, annotations=hints
                )
            )
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")


def _to_result(result: CallToolResult) -> RemoteResult:
    text = "\n".join(map(_to_text, result.content))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair is not valid JSON
    if not result.is_error:
        return RemoteResult(output=text)
    error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
    return RemoteResult(error=error, error_message=text or "the tool has failed")


def _to_text(block: ContentBlock) -> str:
    """Return a block of content as text; of other kinds of content, only what they are."""
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource):
        resource = block.resource
        return resource.text if isinstance(resource, TextResourceContents) else f"[resource {resource.uri}]"
    if hasattr(block, "uri"):
        return f"[resource {block.uri}]"
    return f"[{block.type}, {block.mime_type}]"
