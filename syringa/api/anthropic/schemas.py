"""JSON schemas of the fields of a message request that are validated by hand, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from syringa.api.anthropic.tool_changes import TOOL_REFERENCES
from syringa.api.fields.schema import doc, nullable, object_schema

TOOL_NAME = "^[a-zA-Z0-9_-]{1,128}$"
HOSTED_TYPE = "[a-z_]+_[0-9]{8}|tool_search_tool_[a-z0-9]+|mcp_toolset"
MAX_TOOLS = 512  # agents with several MCP servers have more than OpenAI's API allows
SERVER_BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "container_upload", "fallback"),
)
"""Blocks of tools that run at Anthropic; they are left out of the prompt."""

_STRING = {"type": "string"}
_BOOLEAN = {"type": ["boolean", "null"]}
_CACHE_TTL = {"enum": ["5m", "1h", None], "description": "Accepted; entries leave the cache when space is needed."}
CACHE_CONTROL = nullable(object_schema(("type",), type={"const": "ephemeral"}, ttl=_CACHE_TTL))


def _block(kind: str, required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return object_schema(("type", *required), type={"const": kind}, **properties, cache_control=CACHE_CONTROL)


_TEXT = _block("text", ("text",), text=_STRING, citations={"type": ["array", "null"]})
_TEXTS = {"type": "array", "items": _TEXT}
_IMAGE = _block(
    "image",
    ("source",),
    source={
        "anyOf": [
            object_schema(
                ("type", "media_type", "data"),
                type={"const": "base64"},
                media_type={"enum": ["image/jpeg", "image/png", "image/gif", "image/webp"]},
                data=_STRING,
            ),
            object_schema(("type", "url"), type={"const": "url"}, url=_STRING),
        ]
    },
)
_DOCUMENT = _block(
    "document",
    ("source",),
    source={
        "anyOf": [
            object_schema(
                ("type", "data"), type={"const": "text"}, media_type={"enum": ["text/plain", None]}, data=_STRING
            ),
            object_schema(
                ("type", "content"),
                type={"const": "content"},
                content={"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT, _IMAGE]}}]},
            ),
        ]
    },
    title={"type": ["string", "null"]},
    context={"type": ["string", "null"]},
    citations={"type": ["object", "null"]},
)
_SEARCH_RESULT = _block(
    "search_result",
    ("source", "title", "content"),
    source=_STRING,
    title=_STRING,
    content={"anyOf": [_STRING, _TEXTS]},
    citations={"type": ["object", "null"]},
)
_TOOL_REFERENCE = _block("tool_reference", ("tool_name",), tool_name=_STRING)
_RESULT_PARTS = {"anyOf": [_TEXT, _IMAGE, _DOCUMENT, _SEARCH_RESULT, _TOOL_REFERENCE]}
_TOOL_RESULT = _block(
    "tool_result",
    ("tool_use_id",),
    tool_use_id=_STRING,
    content=nullable(_STRING, {"type": "array", "items": _RESULT_PARTS}),
    is_error=_BOOLEAN,
)
_TOOL_USE = _block("tool_use", ("id", "name", "input"), id=_STRING, name=_STRING, input={"type": "object"})
_THINKING = _block("thinking", ("thinking", "signature"), thinking=_STRING, signature=_STRING)
_REDACTED = _block("redacted_thinking", ("data",), data=_STRING)
_CUSTOM_TOOL = object_schema(
    ("name", "input_schema"),
    type={"enum": ["custom", None]},
    name={"type": "string", "pattern": TOOL_NAME},
    description={"type": ["string", "null"]},
    input_schema={"type": "object", "description": "JSON schema of the input, which is an object."},
    strict={"type": ["boolean", "null"], "description": "Constrain the input to the schema."},
    input_examples={"type": ["array", "null"], "items": {"type": "object"}},
    defer_loading={"type": ["boolean", "null"], "description": "Not offered until a `tool_reference` names it."},
    allowed_callers={"type": ["array", "null"], "items": _STRING},
    eager_input_streaming=_BOOLEAN,
    cache_control=CACHE_CONTROL,
)
_HOSTED_TOOL = object_schema(("type",), type={"type": "string", "pattern": f"^({HOSTED_TYPE})$"})
_TOOL_NAMED = object_schema(
    ("type",),
    type={"enum": list(TOOL_REFERENCES)},
    name={"type": ["string", "null"], "description": "The tool; those of MCP servers are not offered anyway."},
    server_name={"type": ["string", "null"]},
)
_TOOL_DEFINED = object_schema(
    ("type", "definition"),
    type={"const": "tool_definition"},
    definition={"anyOf": [_CUSTOM_TOOL, _HOSTED_TOOL]},
)
_TOOL_CHANGES = (
    _block("tool_addition", ("tool",), tool={"anyOf": [_TOOL_NAMED, _TOOL_DEFINED]}),
    _block("tool_removal", ("tool",), tool=_TOOL_NAMED),
)
_COMPACTION = _block(
    "compaction",
    (),
    content={"type": ["string", "null"]},
    tool_changes={"type": ["array", "null"], "items": {"anyOf": list(_TOOL_CHANGES)}},
    encrypted_content={"type": ["string", "null"]},
    signature={"type": ["string", "null"]},
)
_SERVER_BLOCK = object_schema(("type",), type={"enum": list(SERVER_BLOCKS), "description": "Left out of the prompt."})


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    parts = {"type": "array", "items": {"anyOf": [*blocks, *_TOOL_CHANGES, _COMPACTION, _SERVER_BLOCK]}}
    config = {"type": ["object", "null"], "description": "Reported as ignored."}
    content = {"anyOf": [_STRING, parts]}
    return object_schema(("role", "content"), role={"const": role}, content=content, output_config=config)


_MESSAGE = {
    "anyOf": [
        _message("user", _TEXT, _IMAGE, _DOCUMENT, _SEARCH_RESULT, _TOOL_RESULT),
        _message("assistant", _TEXT, _TOOL_USE, _THINKING, _REDACTED),
        _message("system", _TEXT),
    ]
}
_CHOICE = object_schema(
    ("type",),
    type={
        "enum": ["auto", "any", "tool", "none"],
        "description": "`any`: call a tool; `tool`: call the one of `name`.",
    },
    name={"type": ["string", "null"], "description": "The tool to call; with `tool` only."},
    disable_parallel_tool_use=_BOOLEAN | {"description": "Allow one call at most."},
)
_DISPLAY = {"enum": ["summarized", "omitted", "updates", None]}
_THINKING_CONFIG = nullable(
    object_schema(
        ("type", "budget_tokens"),
        type={"const": "enabled"},
        budget_tokens={"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        display=_DISPLAY,
    ),
    object_schema(("type",), type={"const": "adaptive"}, display=_DISPLAY),
    object_schema(("type",), type={"enum": ["disabled", "between_tools"]}),
)
_FORMAT = object_schema(
    ("type", "schema"),
    type={"const": "json_schema", "description": "`json_schema`."},
    schema={"type": "object", "description": "A JSON schema."},
)

MessagesField = Annotated[
    Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE)]], Meta(min_length=1)],
    doc(
        "The conversation: user and assistant messages, and system messages between them. Consecutive messages of a "
        "role are one turn. If the last message is the assistant's, the output continues it."
    ),
]
SystemField = Annotated[Any, doc("The system prompt: a string, or text blocks.", **nullable(_STRING, _TEXTS))]
MessageToolsField = Annotated[
    Annotated[
        list[Annotated[dict[str, Any], Meta(extra_json_schema={"anyOf": [_CUSTOM_TOOL, _HOSTED_TOOL]})]],
        Meta(max_length=MAX_TOOLS),
    ]
    | None,
    doc(
        f"Tools that the model may call, at most {MAX_TOOLS}. Tools that run at Anthropic, or that its models are"
        " trained on (`web_search_…`, `code_execution_…`, `bash_…` and others with a date in their type), are not"
        " offered to the model, and are named in `x-syringa-ignored`."
    ),
]
MessageToolChoiceField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=_CHOICE)] | None,
    doc("Whether and which tools are called. Default: `auto` if there are tools."),
]
ThinkingField = Annotated[
    Any,
    doc(
        "`enabled` with a budget of tokens, `adaptive`, or `disabled`, which `between_tools` means, too. With"
        " `display: omitted`, thinking blocks have a signature only; `updates` is reported as ignored. The field is,"
        " too, if the model does not reason."
        " Default: `disabled`.",
        **_THINKING_CONFIG,
    ),
]
OutputConfigField = Annotated[
    Annotated[
        dict[str, Any],
        Meta(
            extra_json_schema=object_schema(
                (),
                effort={
                    "enum": ["low", "medium", "high", "xhigh", "max", None],
                    "description": "Effort of thinking; reported as ignored without thinking.",
                },
                format=nullable(_FORMAT) | {"description": "A JSON schema that the text of the output follows."},
            )
        ),
    ]
    | None,
    doc("The format of the output, and the effort of thinking."),
]
OutputFormatField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=_FORMAT)] | None,
    doc("Older name of `output_config.format`, which takes precedence."),
]
CacheControlField = Annotated[
    Annotated[
        dict[str, Any],
        Meta(
            extra_json_schema=object_schema(
                ("type",), type={"const": "ephemeral", "description": "`ephemeral`."}, ttl=_CACHE_TTL
            )
        ),
    ]
    | None,
    doc(
        "Marks the whole conversation for the counts of cached tokens, like `cache_control` of its last block. Prefixes"
        " are cached without it, too."
    ),
]
MessageMetadataField = Annotated[
    Annotated[
        dict[str, Any],
        Meta(
            extra_json_schema=object_schema(
                (), user_id={"type": ["string", "null"], "description": "End-user id, stored with the usage record."}
            )
        ),
    ]
    | None,
    doc("Data about the request."),
]
