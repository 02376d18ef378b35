"""The bodies of `/v1/responses`, `/v1/responses/input_tokens` and `/v1/responses/compact`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.annotations import refused, says, unheeded
from syringa.api.fields.metadata import MetadataField
from syringa.api.fields.sampling import MAX_COUNT, Count, SamplingFields
from syringa.api.fields.tools import MAX_TOOLS
from syringa.api.responses.schemas import (
    CHOICE_SCHEMA,
    CONVERSATION_SCHEMA,
    EMPTY_INCLUDES,
    HONOURED_INCLUDES,
    INPUT_SCHEMA,
    REASONING_SCHEMA,
    STREAM_OPTIONS_SCHEMA,
    TEXT_SCHEMA,
    TOOL_SCHEMA,
)

REFUSED = {
    "prompt": "Prompt templates are not kept here: send `instructions` and `input`.",
    "modalities": "Only text is served here.",
    "audio": "Audio is not served here.",
    "moderation": "This server does not moderate.",
    "context_management": "Nothing is compacted unasked here: call `/v1/responses/compact`.",
    "response_format": "In this API it is `text.format`.",
}
Length = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Key = Annotated[str, Meta(max_length=64)]
Tier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]

ModelField = Annotated[str | None, says("An id from `/v1/models`, an alias, or `default`; absent: the default model.")]
InputField = Annotated[
    Any,
    says(
        "A text of the user, or items: messages, calls and their outputs, reasoning, references, compactions.",
        **INPUT_SCHEMA,
    ),
]
InstructionsField = Annotated[str | None, says("A system message for this response alone; it is not carried over.")]
PreviousField = Annotated[str | None, says("Go on from a stored response; not with `conversation`.")]
ConversationField = Annotated[
    Any, says("The id of a conversation, or an object with it, to go on from and to add to.", **CONVERSATION_SCHEMA)
]
ToolsField = Annotated[
    Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=TOOL_SCHEMA)]], Meta(max_length=MAX_TOOLS)] | None,
    says("Functions and custom tools that the model may call; hosted tools are refused. Not with `grammar`."),
]
ChoiceField = Annotated[
    Any, says("`none`, `auto`, `required`, one tool, or `allowed_tools`; absent: `auto`.", **CHOICE_SCHEMA)
]
ParallelField = Annotated[bool | None, says("Whether several calls may be made at once.", True)]
TextField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=TEXT_SCHEMA)] | None, says("What the answer must be.")
]
ReasoningField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=REASONING_SCHEMA)] | None, says("How much the model thinks.")
]
TruncationField = Annotated[
    Literal["auto", "disabled"] | None,
    says("`auto`: the oldest turns go until the rest fits; `disabled`: what is too long is refused.", "disabled"),
]
TemplateField = Annotated[
    dict[str, Any] | None,
    says("More for the model's chat template. `thinking` or `enable_thinking` false: no thought."),
]
RetentionField = Annotated[
    Literal["in_memory", "24h"] | None, unheeded("Prefixes are kept while there is room; named as ignored.")
]
CacheOptionsField = Annotated[dict[str, Any] | None, unheeded("Prefixes are found by their content.")]
TierField = Annotated[Tier | None, unheeded("There is one tier; any but `auto` and `default` is named as ignored.")]


def _never(name: str) -> Meta:
    return refused(REFUSED[name], type="null")


def _id_of(conversation: Any) -> str | None:
    given = conversation.get("id") if isinstance(conversation, dict) else conversation
    return given if isinstance(given, str) else None


class ResponseRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    model: ModelField = None
    input: InputField = None
    instructions: InstructionsField = None
    previous_response_id: PreviousField = None
    conversation: ConversationField = None
    max_output_tokens: Annotated[
        Length | None, says("Tokens to generate at most, thoughts among them; absent: what the context leaves.")
    ] = None
    stream: Annotated[bool | None, says("Answer in server-sent events.", False)] = None
    stream_options: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=STREAM_OPTIONS_SCHEMA)] | None,
        says("Only with `stream`; `include_obfuscation` is refused."),
    ] = None
    store: Annotated[bool | None, says("Keep the response, so that it can be fetched and gone on from.", True)] = None
    background: Annotated[bool | None, says("Answer at once, and go on without the client; needs `store`.", False)] = (
        None
    )
    tools: ToolsField = None
    tool_choice: ChoiceField = None
    parallel_tool_calls: ParallelField = None
    max_tool_calls: Annotated[Length | None, says("Calls at most; those that the model makes beyond are left out.")] = (
        None
    )
    text: TextField = None
    reasoning: ReasoningField = None
    thinking_token_budget: Annotated[Count | None, says("Tokens after which a thought is closed.")] = None
    chat_template_kwargs: TemplateField = None
    include: Annotated[
        list[Annotated[str, Meta(extra_json_schema={"enum": [*HONOURED_INCLUDES, *EMPTY_INCLUDES]})]] | None,
        says("What else the output has: log-probabilities, sealed thoughts. Results of hosted tools: ignored."),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, says("Alternatives per token; above 0 it asks for `logprobs`.", 0)
    ] = None
    truncation: TruncationField = None
    metadata: Annotated[MetadataField, says("Up to 16 pairs, kept and sent back.")] = None
    user: Annotated[str | None, says("Kept with the usage record, and sent back.")] = None
    safety_identifier: Annotated[
        Key | None, says("Kept with the usage record where `user` is absent, and sent back.")
    ] = None
    prompt_cache_key: Annotated[str | None, says("Sent back. Prefixes are found by their content, without a key.")] = (
        None
    )
    prompt_cache_retention: RetentionField = None
    prompt_cache_options: CacheOptionsField = None
    service_tier: TierField = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=128, extra_json_schema={"const": 1})] | None,
        refused("Refused above 1: a response is one answer."),
    ] = None
    response_format: Annotated[dict[str, Any] | None, _never("response_format")] = None
    prompt: Annotated[Any, _never("prompt")] = None
    modalities: Annotated[Any, _never("modalities")] = None
    audio: Annotated[Any, _never("audio")] = None
    moderation: Annotated[Any, _never("moderation")] = None
    context_management: Annotated[Any, _never("context_management")] = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation's id, whichever way it was given. `prepare` refuses what has none."""
        return _id_of(self.conversation)


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`: what of a response makes its prompt."""

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
    personality: Annotated[str | None, unheeded("Named as ignored.")] = None

    @property
    def conversation_id(self) -> str | None:
        """As in a `ResponseRequest`."""
        return _id_of(self.conversation)


class CompactRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/responses/compact`."""

    model: ModelField = None
    input: InputField = None
    instructions: Annotated[str | None, says("A system message that the conversation was held under.")] = None
    previous_response_id: Annotated[str | None, says("The stored response that ends the conversation.")] = None
    prompt_cache_key: Annotated[str | None, unheeded("Prefixes are found by their content, without a key.")] = None
    prompt_cache_retention: RetentionField = None
    prompt_cache_options: CacheOptionsField = None
    service_tier: TierField = None
