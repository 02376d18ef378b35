"""Writer of responses. Stream events and the full response are built from the same items, so they cannot differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from syringa.api.models.served_model import ServedModel
from syringa.api.responses.item_builders import (
    CustomToolCallItemBuilder,
    FunctionCallItemBuilder,
    MessageItemBuilder,
    OutputItemBuilder,
    ReasoningItemBuilder,
    ToolSearchCallItemBuilder,
)
from syringa.api.responses.items import OutputItem
from syringa.api.responses.mcp.builders import McpApprovalRequestBuilder, McpCallItemBuilder, listing_events
from syringa.api.responses.mcp.items import McpListToolsItem
from syringa.api.responses.response_object import (
    IncompleteDetails,
    RequestEcho,
    Response,
    ResponseError,
    to_response_usage,
)
from syringa.api.responses.stream import OPEN_REASONING, REASONING, ItemEvent, ResponseEvent, StreamEvent
from syringa.api.responses.tool_names import ToolKey
from syringa.errors import EngineOverloaded, RateLimited, RequestError, SyringaError, Unauthorized
from syringa.events import (
    Event,
    Finished,
    PromptScored,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    TokenIds,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from syringa.output.collect import CollectedGeneration
from syringa.remote_tools import RemoteCallFinished, RemoteToolsListed

_CALL_BUILDERS: Mapping[str, type[FunctionCallItemBuilder]] = {
    "custom": CustomToolCallItemBuilder,
    "tool_search": ToolSearchCallItemBuilder,
    "mcp": McpApprovalRequestBuilder,
}
_TERMINAL_STATUSES = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """Options of a request for the way its output is written."""

    model: ServedModel
    tools: Mapping[str, ToolKey] = field(default_factory=dict)  # by the name that the model knows
    max_tool_calls: int | None = None
    max_mcp_calls: int = 0  # further calls are dropped
    needs_approval: frozenset[str] = frozenset()  # names of tools whose calls the client has to approve
    approved: frozenset[str] = frozenset()  # ids of the approval requests whose calls are executed
    encrypt_reasoning: Callable[[str], str] | None = None  # set if the client wants encrypted reasoning
    include_reasoning: bool = True
    open_mode: bool = False


class ResponseWriter:
    """Writes a generation as stream events or as one response, and keeps the items so far."""

    def __init__(self, *, id: str, created: int, echo: RequestEcho, options: WriterOptions, prompt_tokens: int) -> None:
        self.id = id
        self.status = "in_progress"
        self._created, self._echo, self._options = created, echo, options
        self._usage = Usage(prompt_tokens, 0)
        self._next_number = 0
        self._closed: list[OutputItem] = []
        self._open: OutputItemBuilder | None = None
        self._pending: list[ScoredToken] = []  # scored tokens that do not belong to an item yet
        self._reached_limit = False  # the output reached its maximum length
        self.call_count = self.mcp_call_count = 0
        self.waiting_calls: list[McpCallItemBuilder] = []  # written by the model, and not executed yet
        self.awaits_client = False  # whether the output has a call that the client has to execute or to approve
        self._completed_at: int | None = None
        self._error: ResponseError | None = None

    @property
    def response(self) -> Response:
        """A snapshot of the response."""
        return Response(
            **{name: getattr(self._echo, name) for name in RequestEcho.__struct_fields__},
            id=self.id,
            created_at=self._created,
            completed_at=self._completed_at,
            status=self.status,
            error=self._error,
            incomplete_details=IncompleteDetails("max_output_tokens") if self.status == "incomplete" else None,
            output=self._closed + ([self._open.item()] if self._open is not None else []),
            usage=to_response_usage(self._usage),
        )

    @property
    def output(self) -> list[dict[str, Any]]:
        """The output items so far, as they are stored."""
        items: list[dict[str, Any]] = msgspec.to_builtins(self.response.output)
        return items

    def begin(self, *, queued: bool = False) -> list[StreamEvent]:
        """Return the events before the first item. `queued` adds the event of a response that waits to be started."""
        if queued:
            self.status = "queued"
            events = [self._event("created"), self._event("queued")]
            self.status = "in_progress"
            return [*events, self._event("in_progress")]
        return [self._event("created"), self._event("in_progress")]

    @property
    def truncated(self) -> bool:
        """Whether the output has reached its maximum length."""
        return self._reached_limit

    def truncate(self) -> None:
        """End the response as incomplete: no more tokens may be generated."""
        self._reached_limit = True

    def write(self, event: Event | RemoteToolsListed | RemoteCallFinished) -> list[StreamEvent]:
        """Return the stream events for one event of the generation; none after the response has ended."""
        if self.status in _TERMINAL_STATUSES:
            return []
        if isinstance(event, TextDelta):
            return self._add_text(event)
        if isinstance(event, ReasoningDelta):
            if not self._options.include_reasoning:
                return []
            reasoning = self._open if isinstance(self._open, ReasoningItemBuilder) else None
            return reasoning.add(event.text) if reasoning is not None else self._begin_reasoning(event.text)
        if isinstance(event, ToolCallStart):
            return self._begin_call(event)
        if isinstance(event, ToolCallDelta):
            call = self._open if isinstance(self._open, FunctionCallItemBuilder) else None
            return call.add(event.arguments) if call is not None else []
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, PromptScored | TokenIds):
            return []  # never requested by responses
        if isinstance(event, RemoteToolsListed):
            return self._add_list(event)
        if isinstance(event, RemoteCallFinished):
            return self._finish_call(event)
        return self._complete(event)

    def render(self, generation: CollectedGeneration) -> Response:
        """Return the full response; if it was streamed, the one that the events built."""
        for choice in generation.choices[:1]:
            for event in choice.events:
                self.write(event)
        self.write(generation.usage)
        return self.response

    def set_usage(self, usage: Usage) -> None:
        """Set the usage of a response that does not run to its end."""
        self._usage = usage

    def fail(self, error: Exception) -> list[StreamEvent]:
        """End the response after an error. Returns the closing events."""
        if self.status in _TERMINAL_STATUSES:
            return []
        closing = [*self._close("incomplete"), *self._abandon_calls()]
        self._error, self.status = _to_response_error(error), "failed"
        return [*closing, self._event("failed")]

    def cancel(self) -> Response:
        """End the response early, with the output so far."""
        if self.status not in _TERMINAL_STATUSES:
            self._close("incomplete")
            self._abandon_calls()
            self.status = "cancelled"
        return self.response

    def _add_text(self, event: TextDelta) -> list[StreamEvent]:
        message = self._open if isinstance(self._open, MessageItemBuilder) else None
        if message is None:
            self._pending += event.tokens
            if not event.text:
                return []  # a scored token without text does not start a message
            tokens, self._pending = self._pending, []
            message = MessageItemBuilder(self._next_index, self._next, self._options.model)
            return [*self._begin(message), *message.add(event.text, tokens)]
        return message.add(event.text, event.tokens)

    def _begin_reasoning(self, text: str) -> list[StreamEvent]:
        name = OPEN_REASONING if self._options.open_mode else REASONING
        reasoning = ReasoningItemBuilder(self._next_index, self._next, name, self._options.encrypt_reasoning)
        return [*self._begin(reasoning), *reasoning.add(text)]

    def _begin_call(self, event: ToolCallStart) -> list[StreamEvent]:
        if event.id in self._options.approved:
            return self._begin_mcp_call(event)
        if self._options.max_tool_calls is not None and self.call_count >= self._options.max_tool_calls:
            return self._close("completed")
        key = self._options.tools.get(event.name) or ToolKey("function", event.name)
        if key.kind == "mcp" and event.name not in self._options.needs_approval:
            dropped = self.mcp_call_count >= self._options.max_mcp_calls
            return self._close("completed") if dropped else self._begin_mcp_call(event)
        self.call_count += 1
        self.awaits_client = True
        builder = _CALL_BUILDERS.get(key.kind, FunctionCallItemBuilder)
        return self._begin(builder(self._next_index, self._next, event, key))

    def _begin_mcp_call(self, event: ToolCallStart) -> list[StreamEvent]:
        self.call_count += 1
        self.mcp_call_count += 1
        approval = event.id if event.id in self._options.approved else None
        key = self._options.tools[event.name]
        return self._begin(McpCallItemBuilder(self._next_index, self._next, event, key, approval))

    def _finish_call(self, event: RemoteCallFinished) -> list[StreamEvent]:
        events = self._close("completed")
        for call in self.waiting_calls:
            if call.call_id == event.id:
                self.waiting_calls.remove(call)
                return events + self._replace(call, call.finish(event.result))
        return events

    def _abandon_calls(self) -> list[StreamEvent]:
        """Close the calls that are not executed any more."""
        calls, self.waiting_calls = self.waiting_calls, []
        return [event for call in calls for event in self._replace(call, call.end("incomplete"))]

    def _replace(self, call: McpCallItemBuilder, events: list[StreamEvent]) -> list[StreamEvent]:
        """Replace the item of a call by that of its last event."""
        done = events[-1]
        assert isinstance(done, ItemEvent)
        self._closed[call.index] = done.item
        return events

    def _add_list(self, event: RemoteToolsListed) -> list[StreamEvent]:
        events = listing_events(event, self._next_index, self._next)
        done = events[-1]
        assert isinstance(done, ItemEvent)
        self._closed.append(done.item)
        return events

    @property
    def _next_index(self) -> int:
        """Index of the next item in the output."""
        return len(self._closed) + (self._open is not None)

    def _begin(self, item: OutputItemBuilder) -> list[StreamEvent]:
        closing = self._close("completed")
        self._open = item
        return [*closing, *item.begin()]

    def _close(self, status: str) -> list[StreamEvent]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        if status == "completed" and type(item) is McpCallItemBuilder:
            self._closed.append(item.item())  # until it has a result
            self.waiting_calls.append(item)
            return item.end_arguments()
        events = item.end(status)
        done = events[-1]
        assert isinstance(done, ItemEvent)
        self._closed.append(done.item)
        return events

    def _finish(self, event: Finished) -> list[StreamEvent]:
        self._reached_limit = event.reason == "length"
        events: list[StreamEvent] = []
        if self._open is None and all(isinstance(item, McpListToolsItem) for item in self._closed):
            # Clients expect an output item, so empty output becomes a message without text.
            message = MessageItemBuilder(self._next_index, self._next, self._options.model)
            events = self._begin(message)
            events += message.add("", self._pending) if self._pending else []
        return events + self._close("incomplete" if self._reached_limit else "completed")

    def _complete(self, usage: Usage) -> list[StreamEvent]:
        closing = self._abandon_calls()
        self._usage = usage
        self.status = "incomplete" if self._reached_limit else "completed"
        self._completed_at = None if self._reached_limit else int(time.time())
        return [*closing, self._event(self.status)]

    def _event(self, name: str) -> StreamEvent:
        return ResponseEvent(type=f"response.{name}", sequence_number=self._next(), response=self.response)

    def _next(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number


def _to_response_error(error: Exception) -> ResponseError:
    """Convert an exception to the error of a failed response, with one of OpenAI's codes."""
    if not isinstance(error, SyringaError):
        return ResponseError("server_error", "The server failed on this request.")
    if isinstance(error, RateLimited | EngineOverloaded):
        return ResponseError("rate_limit_exceeded", error.message)
    if isinstance(error, RequestError) and not isinstance(error, Unauthorized):
        return ResponseError("invalid_prompt", error.message)
    return ResponseError("server_error", error.message)
