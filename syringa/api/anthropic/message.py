"""Wire types of Anthropic's `message`, and of the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.schema import doc

STOP_REASONS = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
StopReasonField = Annotated[
    str | None,
    doc(
        "Why the output ended: `model_context_window_exceeded` if the context was full before `max_tokens`. Null in "
        "`message_start`.",
        enum=[*STOP_REASONS, None],
    ),
]


class CacheCreationBody(msgspec.Struct, kw_only=True):
    """New tokens up to the last `cache_control`, by its `ttl`."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputTokensBody(msgspec.Struct, kw_only=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. The prompt has `input_tokens` and the two counts of the cache together."""

    input_tokens: Annotated[int, doc("Tokens of the prompt that the other two counts do not include.")]
    cache_creation_input_tokens: Annotated[int, doc("New tokens up to the last `cache_control`; 0 without one.")]
    cache_read_input_tokens: Annotated[int, doc("Tokens of the prompt that were found in the prefix cache.")]
    output_tokens: int
    output_tokens_details: OutputTokensBody
    cache_creation: CacheCreationBody | UnsetType = UNSET  # these two are not in `message_delta`
    service_tier: Annotated[str | UnsetType, doc("`standard`.")] = UNSET


class TextBlock(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`text`.", const="text")] = "text"
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`thinking`.", const="thinking")] = "thinking"
    thinking: Annotated[str, doc("Empty with `display: omitted`.")]
    signature: Annotated[str, doc("Verifies the block when it is sent back.")]


class DirectCaller(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, doc("`direct`.", const="direct")] = "direct"


class ToolUseBlock(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`tool_use`.", const="tool_use")] = "tool_use"
    id: str
    name: str
    input: Annotated[Any, doc("An object. Empty if the output ended inside of it.", type="object")]
    caller: DirectCaller = DirectCaller()  # the model, and not a tool that runs at Anthropic


Block = TextBlock | ThinkingBlock | ToolUseBlock
_BLOCK = Annotated[Any, doc("A block with a `type`: `text`, `thinking` or `tool_use`.", type="object")]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The body of a response that is not streamed."""

    id: str
    type: Annotated[str, doc("`message`.", const="message")] = "message"
    role: Annotated[str, doc("`assistant`.", const="assistant")] = "assistant"
    model: str
    content: list[_BLOCK]
    stop_reason: StopReasonField
    stop_sequence: Annotated[str | None, doc("The stop sequence that ended the output.")]
    usage: MessageUsage


class MessageStart(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`message_start`.", const="message_start")] = "message_start"
    message: Annotated[AssistantMessage, doc("The message without content, with the token counts of the prompt.")]


class BlockStart(msgspec.Struct, kw_only=True, gc=False):
    type: Annotated[str, doc("`content_block_start`.", const="content_block_start")] = "content_block_start"
    index: int
    content_block: _BLOCK


class BlockDeltaBody(msgspec.Struct, kw_only=True, gc=False):
    """What is added to a block: one of the fields beside `type`."""

    type: Annotated[
        str, doc("The kind of delta.", enum=["text_delta", "thinking_delta", "signature_delta", "input_json_delta"])
    ]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: Annotated[str | UnsetType, doc("JSON text of the input, to be joined.")] = UNSET


class BlockDelta(msgspec.Struct, kw_only=True, gc=False):
    type: Annotated[str, doc("`content_block_delta`.", const="content_block_delta")] = "content_block_delta"
    index: int
    delta: BlockDeltaBody


class BlockStop(msgspec.Struct, kw_only=True, gc=False):
    type: Annotated[str, doc("`content_block_stop`.", const="content_block_stop")] = "content_block_stop"
    index: int


class MessageDeltaBody(msgspec.Struct, kw_only=True):
    stop_reason: StopReasonField
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`message_delta`.", const="message_delta")] = "message_delta"
    delta: MessageDeltaBody
    usage: Annotated[MessageUsage, doc("The token counts of the whole message.")]


class MessageStop(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`message_stop`.", const="message_stop")] = "message_stop"


class Ping(msgspec.Struct, kw_only=True):
    """Sent while there is nothing else to send, also before `message_start`."""

    type: Annotated[str, doc("`ping`.", const="ping")] = "ping"


EVENTS: tuple[type[msgspec.Struct], ...] = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    Ping,
)


class TokenCountBody(msgspec.Struct, kw_only=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: Annotated[int, doc("All tokens of the prompt.")]
