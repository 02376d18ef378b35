"""Builders of the output items of MCP servers."""

from __future__ import annotations

import msgspec

from syringa.api.responses.item_builders import FunctionCallItemBuilder, NextSequenceNumber
from syringa.api.responses.items import OutputItem, new_id
from syringa.api.responses.mcp.items import McpApprovalRequestItem, McpCallItem, McpListToolsItem
from syringa.api.responses.stream import ItemEvent, ItemStateEvent, McpArgumentsDoneEvent, StreamEvent
from syringa.api.responses.tool_names import ToolKey
from syringa.events import ToolCallStart
from syringa.remote_tools import RemoteResult, RemoteToolsListed


class McpCallItemBuilder(FunctionCallItemBuilder):
    """A call that the server executes. `end` is called when the model has written it, `finish` with the result."""

    prefix = "mcp"

    def __init__(
        self,
        index: int,
        next_number: NextSequenceNumber,
        start: ToolCallStart,
        key: ToolKey,
        approval_request_id: str | None = None,
    ) -> None:
        super().__init__(index, next_number, start, key)
        self.call_id, self.key = start.id, key
        self._approval_request_id = approval_request_id
        self._result = RemoteResult()

    @property
    def arguments(self) -> str:
        return self._text

    def item(self, status: str = "in_progress") -> McpCallItem:
        return McpCallItem(
            id=self.id,
            status=status,
            server_label=self.key.namespace or "",
            name=self.key.name,
            arguments=self._text,
            output=self._result.output,
            error=self._result.error,
            approval_request_id=self._approval_request_id,
        )

    def begin(self) -> list[StreamEvent]:
        return [self._item_added(self.item()), self._state("in_progress")]

    def add(self, arguments: str) -> list[StreamEvent]:
        self._texts.append(arguments)
        return [self._delta("mcp_call_arguments", arguments)]

    def end_arguments(self) -> list[StreamEvent]:
        """Return the event for a call that the model has written."""
        return [
            McpArgumentsDoneEvent(
                type="response.mcp_call_arguments.done",
                sequence_number=self._next_number(),
                item_id=self.id,
                output_index=self.index,
                arguments=self._text,
            )
        ]

    def finish(self, result: RemoteResult) -> list[StreamEvent]:
        """Return the closing events for a call with this result."""
        self._result = result
        status = "completed" if result.error is None else "failed"
        return [self._state(status), self._item_done(self.item(status))]

    def end(self, status: str) -> list[StreamEvent]:
        """Return the closing event for a call that is not executed."""
        return [self._item_done(self.item(status))]

    def _state(self, state: str) -> StreamEvent:
        return ItemStateEvent(
            type=f"response.mcp_call.{state}",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
        )


class McpApprovalRequestBuilder(McpCallItemBuilder):
    """A call that the client has to approve. It is sent as a whole, or as an incomplete call if it was cut off."""

    prefix = "mcpr"

    def begin(self) -> list[StreamEvent]:
        return []

    def add(self, arguments: str) -> list[StreamEvent]:
        self._texts.append(arguments)
        return []

    def end(self, status: str) -> list[StreamEvent]:
        item: OutputItem = self.item("incomplete")
        if status == "completed":
            item = McpApprovalRequestItem(
                id=self.id, server_label=self.key.namespace or "", name=self.key.name, arguments=self._text
            )
        return [self._item_added(item), self._item_done(item)]


def listing_events(listed: RemoteToolsListed, index: int, next_number: NextSequenceNumber) -> list[StreamEvent]:
    """Return the events of a list of tools, the last of which has the item. `index` is that of the item."""
    empty = McpListToolsItem(id=new_id("mcpl"), server_label=listed.server, tools=[])
    item = msgspec.structs.replace(empty, tools=listed.tools)

    def item_event(name: str, item: McpListToolsItem) -> StreamEvent:
        return ItemEvent(
            type=f"response.output_item.{name}", sequence_number=next_number(), output_index=index, item=item
        )

    def state(name: str) -> StreamEvent:
        return ItemStateEvent(
            type=f"response.mcp_list_tools.{name}",
            sequence_number=next_number(),
            item_id=item.id,
            output_index=index,
        )

    return [item_event("added", empty), state("in_progress"), state("completed"), item_event("done", item)]
