"""Output items of MCP servers on the wire: lists of tools, calls, and requests for approval of a call."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from syringa.api.fields.schema import doc
from syringa.remote_tools import RemoteTool

_LABEL = doc("The `server_label` of the tool.")
_ARGUMENTS = doc("JSON text of the arguments.")


class McpListToolsItem(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_list_tools"):
    id: str
    server_label: Annotated[str, _LABEL]
    tools: Annotated[list[RemoteTool], doc("All tools of the server, also those that are not allowed.")]
    error: str | None = None


class McpCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_call"):
    """A call that this server has executed."""

    id: str
    status: Annotated[
        str, doc("Progress of the call.", enum=["in_progress", "completed", "incomplete", "calling", "failed"])
    ]
    server_label: Annotated[str, _LABEL]
    name: str
    arguments: Annotated[str, _ARGUMENTS]
    output: Annotated[str | None, doc("Null until the call is completed, and if it has failed.")] = None
    error: Annotated[
        dict[str, Any] | None,
        doc("An object of the type `mcp_protocol_error`, `mcp_tool_execution_error` or `http_error`."),
    ] = None
    approval_request_id: Annotated[str | None, doc("Id of the request that the client has approved.")] = None


class McpApprovalRequestItem(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp_approval_request"):
    """A call that the client has to approve with an `mcp_approval_response` item."""

    id: str
    server_label: Annotated[str, _LABEL]
    name: str
    arguments: Annotated[str, _ARGUMENTS]
