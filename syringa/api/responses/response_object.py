"""The response object on the wire: the fields repeated from the request, and the output."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.schema import doc
from syringa.api.responses.items import OutputItem
from syringa.events import Usage


class InputTokens(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: Annotated[int, doc("Always 0: writing to the cache is free.")] = 0


class OutputTokens(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: Annotated[str, doc("One of OpenAI's error codes for failed responses.")]
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Annotated[str, doc("`max_output_tokens`.", const="max_output_tokens")]


class ConversationReference(msgspec.Struct):
    id: str


class ReasoningEcho(msgspec.Struct):
    effort: str | None
    summary: str | None


class RequestEcho(msgspec.Struct, kw_only=True):
    """The fields that are repeated from the request, with defaults for absent ones."""

    model: str
    instructions: str | None
    previous_response_id: str | None
    conversation: ConversationReference | None
    tools: list[dict[str, Any]]
    tool_choice: Annotated[Any, doc("As requested; `auto` if absent.")]
    parallel_tool_calls: bool
    max_tool_calls: int | None
    text: dict[str, Any]
    reasoning: ReasoningEcho
    truncation: str
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    store: bool
    background: bool
    service_tier: str = "default"
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | UnsetType = UNSET


class Response(RequestEcho, kw_only=True):
    """A response, finished or in progress."""

    id: str
    object: Annotated[str, doc("`response`.", const="response")] = "response"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    completed_at: Annotated[int | None, doc("Unix time in seconds; null unless the response is completed.")] = None
    status: Annotated[
        str,
        doc(
            "Status of the response.", enum=["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        ),
    ]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    usage: Annotated[ResponseUsage, doc("Tokens counted so far; before the end, those of the prompt only.")]


def to_response_usage(usage: Usage) -> ResponseUsage:
    """Convert usage to the wire format."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokens(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokens(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
