"""The response object: what was asked, as far as it is repeated, and what came of it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.annotations import says
from syringa.api.responses.items import OutputItem
from syringa.events import Usage


class InputTokens(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: Annotated[int, says("Always 0: what is cached costs nothing extra.")] = 0


class OutputTokens(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: Annotated[str, says("One of OpenAI's codes of failed responses.")]
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Annotated[str, says("`max_output_tokens`.", const="max_output_tokens")]


class ConversationReference(msgspec.Struct):
    id: str


class ReasoningEcho(msgspec.Struct):
    effort: str | None
    summary: str | None


class Echo(msgspec.Struct, kw_only=True):
    """What the object repeats of the request, with the defaults of what was absent."""

    model: str
    instructions: str | None
    previous_response_id: str | None
    conversation: ConversationReference | None
    tools: list[dict[str, Any]]
    tool_choice: Annotated[Any, says("As it was asked; `auto` where it was not.")]
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


class Response(Echo, kw_only=True):
    """A response, whole or as it stands."""

    id: str
    object: Annotated[str, says("`response`.", const="response")] = "response"
    created_at: Annotated[int, says("Unix time, in seconds.")]
    completed_at: Annotated[int | None, says("Null but for a completed response.")] = None
    status: Annotated[
        str, says("How it stands.", enum=["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"])
    ]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem]
    usage: Annotated[ResponseUsage, says("As counted so far: before the end, the prompt alone.")]


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokens(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokens(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
