"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.anthropic.schemas import (
    CacheControlField,
    MessageMetadataField,
    MessagesField,
    MessageToolChoiceField,
    MessageToolsField,
    OutputConfigField,
    OutputFormatField,
    SystemField,
    ThinkingField,
)
from syringa.api.fields.sampling import MAX_STOP, MAX_STOPS, Count, SamplingFields
from syringa.api.fields.schema import doc, ignored_field

_ModelField = Annotated[
    str | None,
    doc("Model id from `/v1/models`, or an alias, which may be a pattern such as `claude-*`. Default: the default."),
]


class MessageRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/messages`."""

    messages: MessagesField
    max_tokens: Annotated[
        Count,
        doc(
            "Maximum number of output tokens, thinking included; reduced to what the context leaves. 0: only compute "
            "the prompt, for the prefix cache."
        ),
    ]
    model: _ModelField = None
    system: SystemField = None
    stream: Annotated[bool | None, doc("Stream the output as server-sent events.", False)] = None
    stop_sequences: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]], Meta(max_length=MAX_STOPS)] | None,
        doc("Texts that end the output and are not part of it; at most 64 of at most 1000 characters. Adds to `stop`."),
    ] = None
    tools: MessageToolsField = None
    tool_choice: MessageToolChoiceField = None
    thinking: ThinkingField = None
    output_config: OutputConfigField = None
    output_format: OutputFormatField = None
    cache_control: CacheControlField = None
    metadata: MessageMetadataField = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, ignored_field("There is one tier, the standard one.")
    ] = None
    speed: Annotated[
        Literal["standard", "fast"] | None, ignored_field("There is one speed; `fast` is reported as ignored.")
    ] = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    messages: MessagesField
    model: _ModelField = None
    system: SystemField = None
    tools: MessageToolsField = None
    tool_choice: MessageToolChoiceField = None
    thinking: ThinkingField = None
    output_config: OutputConfigField = None
    output_format: OutputFormatField = None
    cache_control: CacheControlField = None


PromptBody = MessageRequest | CountTokensRequest


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Any = None


class OutputFormatConfig(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class MetadataConfig(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class CacheControl(msgspec.Struct, kw_only=True):
    """A mark at the end of a block: the prompt up to it counts as created in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
