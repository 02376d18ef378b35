"""The events of a response's stream. Each has its type and its place in the stream.

Those of a thought are named differently by OpenAI and by Open Responses, so `type` is a field and no tag.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from syringa.api.fields.annotations import says
from syringa.api.responses.items import Logprob, OutputItem, Part
from syringa.api.responses.response_object import Response


class StreamEvent(msgspec.Struct, kw_only=True, gc=False):
    type: str
    sequence_number: Annotated[int, says("From 0, one more with each event.")]


class ResponseEvent(StreamEvent):
    """The response as it stands: created, queued, in_progress, completed, incomplete or failed."""

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
    part: Part


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
    """`response.function_call_arguments.delta` and `response.custom_tool_call_input.delta`."""

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
