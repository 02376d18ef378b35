"""Stream events of a response, and the differences between OpenAI's and Open Responses' streams.

Reasoning events have different types in the two, so `type` is a field and not a struct tag.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from syringa.api.fields.common import ErrorBody
from syringa.api.fields.schema import doc
from syringa.api.responses.items import ContentPart, Logprob, OutputItem
from syringa.api.responses.response_object import Response

REASONING, OPEN_REASONING = "reasoning_text", "reasoning"
_STATES = ("delta", "done")
_TO_OPEN = {f"response.{REASONING}.{state}": f"response.{OPEN_REASONING}.{state}" for state in _STATES}
_FROM_OPEN = {open_type: type for type, open_type in _TO_OPEN.items()}


class StreamEvent(msgspec.Struct, kw_only=True, gc=False):
    type: str
    sequence_number: Annotated[int, doc("Number of the event in the stream, from 0.")]


class ResponseEvent(StreamEvent):
    """`response.created`, `.queued`, `.in_progress`, `.completed`, `.incomplete` and `.failed`."""

    response: Response


class ItemEvent(StreamEvent):
    """`response.output_item.added` and `.done`."""

    output_index: int
    item: OutputItem


class PartEvent(StreamEvent):
    """`response.content_part.added` and `.done`."""

    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class TextDeltaEvent(StreamEvent):
    """`response.output_text.delta`."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Logprob]


class TextDoneEvent(StreamEvent):
    """`response.output_text.done`."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[Logprob]


class ReasoningDeltaEvent(StreamEvent):
    """`response.reasoning_text.delta`; `response.reasoning.delta` in Open Responses."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(StreamEvent):
    """`response.reasoning_text.done`; `response.reasoning.done` in Open Responses."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class CallDeltaEvent(StreamEvent):
    """`response.function_call_arguments.delta`, `.custom_tool_call_input.delta` and `.mcp_call_arguments.delta`."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(StreamEvent):
    """`response.function_call_arguments.done`."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDoneEvent(StreamEvent):
    """`response.custom_tool_call_input.done`."""

    item_id: str
    output_index: int
    input: str


class McpArgumentsDoneEvent(StreamEvent):
    """`response.mcp_call_arguments.done`."""

    item_id: str
    output_index: int
    arguments: str


class ItemStateEvent(StreamEvent):
    """`response.mcp_call` and `response.mcp_list_tools`, each with `.in_progress` and `.completed`, or `.failed`."""

    item_id: str
    output_index: int


def event_type_for_mode(name: str, open_mode: bool) -> str:
    """Return the type of an event in OpenAI's or Open Responses' stream, given its type in either."""
    return (_TO_OPEN if open_mode else _FROM_OPEN).get(name, name)


def error_event(error: ErrorBody, number: int, open_mode: bool) -> dict[str, Any]:
    """Return the event that ends a stream after an error."""
    head = {"type": "error", "sequence_number": number}
    if open_mode:
        return head | {"error": msgspec.to_builtins(error)}
    return head | {"code": error.code, "message": error.message, "param": error.param}
