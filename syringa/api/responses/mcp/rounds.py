"""The generations of a response with MCP servers: calls are executed between them, and their results are the input of
the next one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from syringa.api.chat.messages import read_arguments
from syringa.api.responses.mcp.input import ApprovedCall
from syringa.api.responses.mcp.tools import MCP, McpTools
from syringa.api.responses.tool_names import ToolKey
from syringa.api.responses.writer import ResponseWriter
from syringa.errors import InvalidRequest
from syringa.events import Event, GenerationRequest, ToolCallDelta, ToolCallStart
from syringa.remote_tools import RemoteCallFinished, RemoteConnection, RemoteResult, RemoteToolClient

Emit = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, kw_only=True)
class NextRequest:
    """What a generation after the first one depends on, besides the output so far."""

    number: int  # of the generation, from 1
    output_tokens: int  # of those before it
    calls_left: int | None  # of `max_tool_calls`; None: any number
    mcp: bool  # whether tools of MCP servers may still be called


BuildRequest = Callable[[NextRequest], Awaitable[GenerationRequest | None]]
"""Returns the next request, or None if no output tokens are left."""


class McpRounds:
    """Executes the calls of one response. `max_calls` bounds them, whatever the client asks for."""

    def __init__(
        self,
        *,
        first: GenerationRequest,
        build: BuildRequest,
        writer: ResponseWriter,
        tools: McpTools,
        approved: Sequence[ApprovedCall],
        client: RemoteToolClient,
        max_calls: int,
        max_tool_calls: int | None,
    ) -> None:
        self._first, self._build, self._writer = first, build, writer
        self._tools, self._approved, self._client = tools, approved, client
        self._max_calls, self._max_tool_calls = max_calls, max_tool_calls
        self._connections: dict[str, RemoteConnection] = {}
        self._number = 0

    async def begin(self, emit: Emit) -> GenerationRequest | None:
        """Emit the lists of tools, execute the calls that the client has approved, and return the first request."""
        send = cast(Callable[[Sequence[Any]], None], emit)
        if self._tools.listed:
            send(self._tools.listed)
        for index, call in enumerate(self._approved):
            key = ToolKey(MCP, call.name, call.server_label)
            send(
                [
                    ToolCallStart(0, index, call.request_id, key.prompt_name),
                    ToolCallDelta(0, index, call.arguments),
                ]
            )
            result = await self._execute(key, call.arguments)
            send([RemoteCallFinished(call.request_id, result)])
        return await self._next(0) if self._approved else self._first

    async def next(self, emit: Emit, output_tokens: int) -> GenerationRequest | None:
        """Execute the calls of the last generation, and return the next request, or None if the response ends here.

        `output_tokens`: the number of output tokens so far.
        """
        send = cast(Callable[[Sequence[Any]], None], emit)
        calls = list(self._writer.waiting_calls)
        if not calls or self._writer.truncated:
            return None
        for call in calls:
            result = await self._execute(call.key, call.arguments)
            send([RemoteCallFinished(call.call_id, result)])
        return None if self._writer.awaits_client else await self._next(output_tokens)

    def close(self) -> None:
        """End all connections. A running call is cancelled."""
        for connection in self._connections.values():
            connection.close()

    async def _next(self, output_tokens: int) -> GenerationRequest | None:
        self._number += 1
        left = None
        if self._max_tool_calls is not None:
            left = self._max_tool_calls - self._writer.call_count
        mcp = self._writer.mcp_call_count < self._max_calls
        request = await self._build(
            NextRequest(number=self._number, output_tokens=output_tokens, calls_left=left, mcp=mcp)
        )
        if request is None:
            self._writer.truncate()
        return request

    async def _execute(self, key: ToolKey, arguments: str) -> RemoteResult:
        label = key.namespace or ""
        try:
            parsed = read_arguments(arguments, "arguments")
        except InvalidRequest as error:
            failure = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error.message}]}
            return RemoteResult(error=failure, error_message=error.message)
        connection = self._connections.get(label)
        if connection is None:
            connection = self._connections[label] = self._client.connect(self._tools.servers[label])
        return await connection.call_tool(key.name, parsed)
