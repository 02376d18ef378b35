"""The access log, and the log of prompts and outputs where the administrator enables it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from syringa import logs
from syringa.api.responses.mcp.tools import MCP, mcp_tool_echo
from syringa.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from syringa.generation import Emit
from syringa.http.context import request_context
from syringa.service.auth.keys import Caller
from syringa.service.usage.accounting import CANCELLED, RequestAccounting

logger = logging.getLogger("syringa.access")

_MAX_PATH = 200


def log_request(scope: Scope, seconds: float) -> None:
    """Log a finished request. Its query, headers and body are not logged."""
    context = request_context(scope)
    level = logging.DEBUG if context.endpoint.monitoring else logging.INFO
    if not logger.isEnabledFor(level):
        return
    status = context.status or CANCELLED  # nothing was sent: the client disconnected
    method = scope.get("method", "WEBSOCKET")
    path: str = scope["path"]
    if len(path) > _MAX_PATH:
        path = path[:_MAX_PATH] + "…"
    seconds = round(seconds, 6)
    fields: dict[str, Any] = {"method": method, "path": path, "status": status, "seconds": seconds}
    details = _describe_caller(context.caller, fields)
    if context.accounting is not None:
        details += _describe_generation(context.accounting, fields)
    message = f"{method} {path} {status} {seconds:.3f} s{details}"
    logger.log(level, message, extra={"fields": fields, "request_id": context.request_id})


def log_response(accounting: RequestAccounting) -> None:
    """Log a finished response that has no HTTP request of its own: in the background, or over a WebSocket."""
    if not logger.isEnabledFor(logging.INFO):
        return
    seconds = round(accounting.total_seconds, 6)
    fields: dict[str, Any] = {"path": accounting.endpoint, "status": accounting.status, "seconds": seconds}
    details = _describe_caller(accounting.caller, fields) + _describe_generation(accounting, fields, finished=True)
    message = f"RESPONSE {accounting.endpoint} {accounting.status} {seconds:.3f} s{details}"
    logger.info(message, extra={"fields": fields, "request_id": accounting.request_id})


def _describe_caller(caller: Caller | None, fields: dict[str, Any]) -> str:
    if caller is None or not caller.organization:
        return ""
    fields["organization"], fields["key"] = caller.organization, caller.key
    return f" organization={caller.organization} key={caller.key}"


def _describe_generation(accounting: RequestAccounting, fields: dict[str, Any], *, finished: bool = False) -> str:
    fields["model"] = accounting.model
    if accounting.detached and not finished:
        fields["outcome"] = "later"
        return f" model={accounting.model} outcome=later"
    fields["outcome"] = accounting.outcome
    stats = accounting.stats
    fields["input_tokens"], fields["output_tokens"] = stats.prompt_tokens, stats.completion_tokens
    tokens = f"{stats.prompt_tokens}+{stats.completion_tokens}"
    return f" model={accounting.model} tokens={tokens} outcome={accounting.outcome}"


def log_request_body(body: bytes) -> None:
    """Log the body of a request, where prompts are to be logged."""
    if logs.PROMPTS.isEnabledFor(logging.INFO):
        shown = _without_secrets(body)
        logs.PROMPTS.info("request: %s", logs.truncated(shown[: 4 * logs.MAX_TEXT].decode("utf-8", "replace")))


def _without_secrets(body: bytes) -> bytes:
    """Return a body without the credentials of MCP servers."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        may_have_some = b"authorization" in body or b"headers" in body
        return b"(not shown: not valid JSON)" if may_have_some else body
    if not isinstance(fields, dict):
        return body
    shown: dict[str, Any] = {}
    tools = fields.get("tools")
    if isinstance(tools, list) and any(_is_mcp(tool) for tool in tools):
        shown["tools"] = [mcp_tool_echo(tool) if _is_mcp(tool) else tool for tool in tools]
    if "mcp_servers" in fields:  # of Anthropic's API, with tokens in them
        shown["mcp_servers"] = "(not shown)"
    return msgspec.json.encode(fields | shown) if shown else body


def _is_mcp(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == MCP


@contextlib.contextmanager
def log_output(emit: Emit) -> Iterator[Emit]:
    """Yield `emit` itself, or where outputs are to be logged, a wrapper that collects the text."""
    if not logs.PROMPTS.isEnabledFor(logging.INFO):
        yield emit
        return
    output: list[str] = []

    def collect_and_emit(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TextDelta | ReasoningDelta):
                output.append(event.text)
            elif isinstance(event, ToolCallStart):
                output.append(f" {event.name}: ")
            elif isinstance(event, ToolCallDelta):
                output.append(event.arguments)
        emit(events)

    try:
        yield collect_and_emit
    finally:
        logs.PROMPTS.info("answer: %s", logs.truncated("".join(output)))
