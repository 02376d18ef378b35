"""Items of MCP servers in the input and in the history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from syringa.api.chat.messages import read_arguments
from syringa.api.responses.message_builder import MessageBuilder
from syringa.api.responses.tool_names import prompt_name
from syringa.errors import InvalidRequest
from syringa.remote_tools import RemoteTool

MCP_ITEM_TYPES = ("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response")
_REFUSED = "The user has refused this call."

Convert = Callable[[dict[str, Any], type[Any], str], Any]
Store = Callable[..., dict[str, Any]]


class InputMcpListTools(msgspec.Struct, kw_only=True):
    type: str
    server_label: str
    tools: list[RemoteTool]
    error: Any = None
    id: str | None = None


class InputMcpCall(msgspec.Struct, kw_only=True):
    type: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None
    approval_request_id: str | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] = "completed"


class InputMcpApprovalRequest(msgspec.Struct, kw_only=True):
    type: str
    server_label: str
    name: str
    arguments: str
    id: str | None = None


class InputMcpApprovalResponse(msgspec.Struct, kw_only=True):
    type: str
    approval_request_id: str
    approve: bool
    reason: str | None = None
    request_id: Any = None  # required by OpenAI's schema, but not described in it
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ApprovedCall:
    """A call that the client has approved in this request. `path` is that of the approval."""

    request_id: str
    server_label: str
    name: str
    arguments: str
    path: str


class McpItemReader:
    """Reads items in order. `convert` and `store` are those of the reader of all items."""

    def __init__(self, builder: MessageBuilder, convert: Convert, store: Store) -> None:
        self._builder, self._convert, self._store = builder, convert, store
        self.lists: dict[str, list[RemoteTool]] = {}  # by server_label
        self._requests: dict[str, InputMcpApprovalRequest] = {}
        self._answered: set[str] = set()
        self._executed: set[str] = set()
        self._approved: list[ApprovedCall] = []

    @property
    def approved(self) -> list[ApprovedCall]:
        """The calls that the new input approves and that were not executed yet."""
        return [each for each in self._approved if each.request_id not in self._executed]

    def read(self, given: dict[str, Any], path: str, *, stored: bool) -> dict[str, Any]:
        """Add an item to the conversation. Returns it as it is stored."""
        match given["type"]:
            case "mcp_list_tools":
                return self._list(given, path)
            case "mcp_call":
                return self._call(given, path, stored)
            case "mcp_approval_request":
                return self._request(given, path)
        return self._answer(given, path, stored)

    def _list(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        field: InputMcpListTools = self._convert(given, InputMcpListTools, path)
        if not field.error:
            self.lists[field.server_label] = field.tools
        tools = msgspec.to_builtins(field.tools)
        return self._store(
            field, field.type, path, server_label=field.server_label, tools=tools, error=_error_text(field.error)
        )

    def _call(self, given: dict[str, Any], path: str, stored: bool) -> dict[str, Any]:
        field: InputMcpCall = self._convert(given, InputMcpCall, path)
        item = self._store(
            field,
            field.type,
            path,
            server_label=field.server_label,
            name=field.name,
            arguments=field.arguments,
            output=field.output,
            error=field.error,
            approval_request_id=field.approval_request_id,
        )
        if field.approval_request_id is not None:
            self._executed.add(field.approval_request_id)
        try:
            arguments = read_arguments(field.arguments, f"{path}.arguments")
        except InvalidRequest:
            if not stored:
                raise
            return item  # the call was cut off, and is left out of the prompt
        if field.status in ("completed", "failed"):
            error = _error_text(field.error)
            self._add(item["id"], field, arguments, field.output or "" if error is None else f"Error: {error}")
        return item

    def _request(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        field: InputMcpApprovalRequest = self._convert(given, InputMcpApprovalRequest, path)
        item = self._store(
            field, field.type, path, server_label=field.server_label, name=field.name, arguments=field.arguments
        )
        self._requests[item["id"]] = field
        return item

    def _answer(self, given: dict[str, Any], path: str, stored: bool) -> dict[str, Any]:
        field: InputMcpApprovalResponse = self._convert(given, InputMcpApprovalResponse, path)
        reason = {} if field.reason is None else {"reason": field.reason}
        id = field.approval_request_id
        item = self._store(
            field, field.type, path, approval_request_id=id, request_id=id, approve=field.approve, **reason
        )
        request = self._requests.get(id)
        if request is None or id in self._answered:
            if stored:
                return item
            path += ".approval_request_id"
            problem = "was answered before" if request is not None else "is not that of an earlier mcp_approval_request"
            raise InvalidRequest(f"{path}: {id!r} {problem}.", param=path)
        self._answered.add(id)
        if not field.approve:
            self._add(id, request, _lenient_arguments(request), f"{_REFUSED} {field.reason or ''}".rstrip())
        elif not stored:
            self._approved.append(
                ApprovedCall(
                    request_id=id,
                    server_label=request.server_label,
                    name=request.name,
                    arguments=request.arguments,
                    path=f"{path}.approval_request_id",
                )
            )
        return item

    def _add(
        self, id: str, call: InputMcpCall | InputMcpApprovalRequest, arguments: dict[str, Any], result: str
    ) -> None:
        name = prompt_name(call.name, call.server_label)
        self._builder.add_call(id, name, arguments)
        self._builder.add_result(id, name, result)


def _lenient_arguments(request: InputMcpApprovalRequest) -> dict[str, Any]:
    try:
        return read_arguments(request.arguments, "arguments")
    except InvalidRequest:
        return {}


def _error_text(error: Any) -> str | None:
    """Return the text of an error: an object of OpenAI's schema, or a text as earlier versions of it had."""
    if not error:
        return None
    if not isinstance(error, dict):
        return str(error)
    content = error.get("content")
    if isinstance(content, list):
        return "\n".join(str(each.get("text", "")) for each in content if isinstance(each, dict))
    return str(error.get("message") or content or error.get("type") or "the call has failed")
