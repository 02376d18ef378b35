"""Request bodies of `/v1/responses`, `/v1/responses/input_tokens` and `/v1/responses/compact`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.common import CacheSaltField, MetadataField
from syringa.api.fields.compatibility import CompatibilityFields
from syringa.api.fields.hosted_tools import NAMES as HOSTED_NAMES
from syringa.api.fields.reasoning import BudgetField
from syringa.api.fields.sampling import MAX_COUNT
from syringa.api.fields.schema import doc, ignored_field, refused_field
from syringa.api.fields.tools import MAX_TOOLS
from syringa.api.responses.schemas import (
    CHOICE_SCHEMA,
    CONVERSATION_SCHEMA,
    EMPTY_INCLUDES,
    HONORED_INCLUDES,
    INPUT_SCHEMA,
    REASONING_SCHEMA,
    STREAM_OPTIONS_SCHEMA,
    TEXT_SCHEMA,
    TOOL_SCHEMA,
)

REFUSED = {
    "prompt": "Stored prompt templates are not supported; send `instructions` and `input`.",
    "modalities": "Only text is supported.",
    "audio": "Audio is not supported.",
    "moderation": "Moderation is not supported.",
    "context_management": "Automatic compaction is not supported; call `/v1/responses/compact`.",
    "response_format": "Use `text.format` in this API.",
}
Length = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Key = Annotated[str, Meta(max_length=64)]
Tier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]

ModelField = Annotated[
    str | None, doc("Model id from `/v1/models`, an alias, or `default`. Default: the default model.")
]
InputField = Annotated[
    Any,
    doc(
        "A user message as text, or an array of items: messages, tool calls and their outputs, reasoning, item "
        "references, compactions.",
        **INPUT_SCHEMA,
    ),
]
InstructionsField = Annotated[
    str | None, doc("System message for this response only; it does not carry over to the next one.")
]
PreviousField = Annotated[str | None, doc("Stored response to continue from; cannot be combined with `conversation`.")]
ConversationField = Annotated[
    Any, doc("Conversation to continue from and to append to: its id, or an object with its id.", **CONVERSATION_SCHEMA)
]
ToolsField = Annotated[
    Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=TOOL_SCHEMA)]], Meta(max_length=MAX_TOOLS)] | None,
    doc(
        "Functions, custom tools, namespaces of them, MCP servers with a `server_url`, and a `tool_search` that the "
        "client executes, at most 128; "
        f"cannot be combined with `grammar`. Hosted tools ({HOSTED_NAMES}, `tool_search` on the server) are not "
        "offered to the model, and are named in `x-syringa-ignored`."
    ),
]
ChoiceField = Annotated[
    Any, doc("`none`, `auto`, `required`, a tool to call, or `allowed_tools`. Default: `auto`.", **CHOICE_SCHEMA)
]
ParallelField = Annotated[bool | None, doc("Whether the model may make several calls in one response.", True)]
TextField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=TEXT_SCHEMA)] | None, doc("Format of the output text.")
]
ReasoningField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=REASONING_SCHEMA)] | None, doc("Reasoning options.")
]
TruncationField = Annotated[
    Literal["auto", "disabled"] | None,
    doc("`auto`: drop the oldest turns of a conversation that is too long; `disabled`: refuse it.", "disabled"),
]
TemplateField = Annotated[
    dict[str, Any] | None,
    doc("Extra variables for the chat template. `thinking` or `enable_thinking`: false turns reasoning off."),
]
RetentionField = Annotated[
    Literal["in_memory", "24h"] | None,
    ignored_field("Cached prefixes are kept while there is memory; reported as ignored."),
]
CacheOptionsField = Annotated[
    dict[str, Any] | None, ignored_field("The prefix cache is keyed by content; reported as ignored.")
]
TierField = Annotated[
    Tier | None, ignored_field("There is one tier; values other than `auto` and `default` are reported as ignored.")
]


def _unsupported(name: str) -> Meta:
    return refused_field(REFUSED[name], type="null")


def _id_of(conversation: Any) -> str | None:
    given = conversation.get("id") if isinstance(conversation, dict) else conversation
    return given if isinstance(given, str) else None


class ResponseRequest(CompatibilityFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    model: ModelField = None
    input: InputField = None
    instructions: InstructionsField = None
    previous_response_id: PreviousField = None
    conversation: ConversationField = None
    max_output_tokens: Annotated[
        Length | None, doc("Maximum number of output tokens, reasoning included. Default: the rest of the context.")
    ] = None
    stream: Annotated[bool | None, doc("Stream the response as server-sent events.", False)] = None
    stream_options: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=STREAM_OPTIONS_SCHEMA)] | None,
        doc("Options of the stream; requires `stream: true`."),
    ] = None
    store: Annotated[bool | None, doc("Store the response, so that it can be retrieved and continued.", True)] = None
    background: Annotated[
        bool | None, doc("Return at once and generate in the background; requires `store`.", False)
    ] = None
    tools: ToolsField = None
    tool_choice: ChoiceField = None
    parallel_tool_calls: ParallelField = None
    max_tool_calls: Annotated[
        Length | None,
        doc("Maximum number of tool calls, those of MCP servers included; further calls are dropped."),
    ] = None
    text: TextField = None
    reasoning: ReasoningField = None
    thinking_token_budget: BudgetField = None
    include_reasoning: Annotated[
        bool | None, doc("Return reasoning items; false: reasoning is generated and counted, but left out.", True)
    ] = None
    request_id: Annotated[
        str | None, ignored_field("The server chooses the ids of responses, which it stores; reported as ignored.")
    ] = None
    chat_template_kwargs: TemplateField = None
    include: Annotated[
        list[Annotated[str, Meta(extra_json_schema={"enum": [*HONORED_INCLUDES, *EMPTY_INCLUDES]})]] | None,
        doc("Additional output: log-probabilities, encrypted reasoning. Values for hosted tools are ignored."),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        doc(
            "Number of most likely tokens to return at each position, 0 to 20; a value above 0 implies "
            "log-probabilities.",
            0,
        ),
    ] = None
    truncation: TruncationField = None
    metadata: Annotated[MetadataField, doc("Up to 16 key-value pairs, stored and returned with the response.")] = None
    user: Annotated[str | None, doc("End-user id, stored with the usage record and returned.")] = None
    safety_identifier: Annotated[
        Key | None,
        doc("End-user id, stored with the usage record if `user` is absent, and returned; at most 64 characters."),
    ] = None
    prompt_cache_key: Annotated[
        str | None, doc("Returned, and otherwise without effect: the prefix cache is keyed by content.")
    ] = None
    prompt_cache_retention: RetentionField = None
    prompt_cache_options: CacheOptionsField = None
    cache_salt: CacheSaltField = None
    service_tier: TierField = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=128, extra_json_schema={"const": 1})] | None,
        refused_field("Refused above 1: a response has one output."),
    ] = None
    response_format: Annotated[dict[str, Any] | None, _unsupported("response_format")] = None
    prompt: Annotated[Any, _unsupported("prompt")] = None
    modalities: Annotated[Any, _unsupported("modalities")] = None
    audio: Annotated[Any, _unsupported("audio")] = None
    moderation: Annotated[Any, _unsupported("moderation")] = None
    context_management: Annotated[Any, _unsupported("context_management")] = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation; None if the field is absent or invalid."""
        return _id_of(self.conversation)


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`: the fields of a response that make up its prompt."""

    model: ModelField = None
    input: InputField = None
    instructions: InstructionsField = None
    previous_response_id: PreviousField = None
    conversation: ConversationField = None
    tools: ToolsField = None
    tool_choice: ChoiceField = None
    parallel_tool_calls: ParallelField = None
    text: TextField = None
    reasoning: ReasoningField = None
    chat_template_kwargs: TemplateField = None
    truncation: TruncationField = None
    personality: Annotated[str | None, ignored_field("Reported as ignored.")] = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation; None if the field is absent or invalid."""
        return _id_of(self.conversation)


class CompactRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/responses/compact`."""

    model: ModelField = None
    input: InputField = None
    instructions: Annotated[str | None, doc("System message of the conversation.")] = None
    previous_response_id: Annotated[str | None, doc("Stored response that ends the conversation.")] = None
    prompt_cache_key: Annotated[
        str | None, ignored_field("The prefix cache is keyed by content; reported as ignored.")
    ] = None
    prompt_cache_retention: RetentionField = None
    prompt_cache_options: CacheOptionsField = None
    cache_salt: CacheSaltField = None
    service_tier: TierField = None
