"""Output items of a response on the wire: messages, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ServedModel
from syringa.api.responses.mcp.items import McpApprovalRequestItem, McpCallItem, McpListToolsItem
from syringa.events import ScoredToken
from syringa.ids import random_id

_NAMESPACE = doc("Namespace of the tool; absent if it has none.")
OutputItemStatus = Annotated[str, doc("Progress of the item.", enum=["in_progress", "completed", "incomplete"])]


class TopLogprob(msgspec.Struct):
    token: Annotated[str, doc("Text of the token; incomplete UTF-8 is written as `bytes:\\x…`.")]
    logprob: float
    bytes: Annotated[list[int], doc("UTF-8 bytes of the token; empty for a special token.")]


class Logprob(TopLogprob):
    """An output token with its log-probability."""

    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: Annotated[list[Logprob], doc("Empty unless requested.")] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: OutputItemStatus
    role: Annotated[str, doc("`assistant`.", const="assistant")] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    id: str
    status: OutputItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: Annotated[
        str | UnsetType,
        doc(
            "The encrypted reasoning, for clients that send it back instead of storing responses. Only if requested in "
            "`include`."
        ),
    ] = UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: OutputItemStatus
    call_id: Annotated[str, doc("Id of the call, which its output item has to repeat.")]
    name: str
    namespace: Annotated[str | UnsetType, _NAMESPACE] = UNSET
    arguments: Annotated[str, doc("JSON text of the arguments.")]


class CustomToolCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: OutputItemStatus
    call_id: Annotated[str, doc("Id of the call, which its output item has to repeat.")]
    name: str
    namespace: Annotated[str | UnsetType, _NAMESPACE] = UNSET
    input: str


class ToolSearchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A search for more tools, which the client executes."""

    id: str
    status: OutputItemStatus
    call_id: Annotated[str, doc("Id of the call, which its output item has to repeat.")]
    execution: Annotated[str, doc("`client`.", const="client")] = "client"
    arguments: Annotated[dict[str, Any], doc("Empty until the item is completed.")]


OutputItem = (
    OutputMessage
    | ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | ToolSearchCallItem
    | McpListToolsItem
    | McpCallItem
    | McpApprovalRequestItem
)
ContentPart = OutputText | ReasoningText


def new_id(prefix: str) -> str:
    return random_id(f"{prefix}_")


def to_logprobs(tokens: Iterable[ScoredToken], model: ServedModel) -> list[Logprob]:
    """Convert scored tokens to the wire format. The bytes of a special token are empty, unlike null in chat."""
    special, tokenizer = model.tokenizer.special_ids, model.tokenizer

    def token_bytes(token: int) -> list[int]:
        return [] if token in special else list(tokenizer.token_bytes(token))

    converted = []
    for scores in (each.scores for each in tokens):
        top = [TopLogprob(model.token_text(token), logprob, token_bytes(token)) for token, logprob in scores.top]
        converted.append(Logprob(model.token_text(scores.token), scores.logprob, token_bytes(scores.token), top))
    return converted
