"""JSON schemas of fields that are validated by hand: input items, tools, text format and reasoning."""

from __future__ import annotations

from typing import Any

from syringa.api.fields.hosted_tools import HOSTED_TOOLS
from syringa.api.fields.schema import REFUSED, nullable, object_schema
from syringa.api.fields.tools import MAX_TOOLS

NAME = "^[a-zA-Z0-9_-]{1,64}$"
ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "reasoning",
    "item_reference",
    "compaction",
)
HONORED_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url")
EMPTY_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

_TEXT: dict[str, Any] = {"type": "string"}
_NULLABLE_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_STATUS = {"enum": ["in_progress", "completed", "incomplete", None]}
_DEFER_LOADING = {
    "type": ["boolean", "null"],
    "description": "Offer the tool only once a tool search has found it. Without a tool search, it is offered at once.",
}
_ITEM_NAMESPACE = {"type": ["string", "null"], "pattern": NAME}
_EXECUTION = {"enum": ["client", "server", None]}
MAX_ID_LENGTH = 256
_ID = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": MAX_ID_LENGTH,
    "description": "Generated if absent.",
}


def _part(type_: str, key: str) -> dict[str, Any]:
    return object_schema(("type", key), type={"const": type_}, **{key: _TEXT})


_IMAGE = object_schema(
    ("type", "image_url"),
    type={"const": "input_image"},
    image_url={"type": "string", "description": "An http(s) URL, or a base64 `data:` URI."},
    detail={"enum": ["auto", "low", "high", None]},
    file_id={"type": "null", REFUSED: True},
)


def _content(*parts: dict[str, Any]) -> dict[str, Any]:
    items = {"anyOf": list(parts)} if len(parts) > 1 else parts[0]
    return {"anyOf": [_TEXT, {"type": "array", "items": items, "minItems": 1}]}


_USER_CONTENT = _content(_part("input_text", "text"), _part("output_text", "text"), _IMAGE)
_ASSISTANT_CONTENT = _content(_part("output_text", "text"), _part("input_text", "text"), _part("refusal", "refusal"))
_OUTPUT_CONTENT = _content(_part("input_text", "text"))
_MESSAGE_TYPE = {"enum": ["message", None]}


def _texts(type_: str) -> dict[str, Any]:
    return {"type": ["array", "null"], "items": _part(type_, "text")}


_FUNCTION = object_schema(
    ("type", "name"),
    type={"const": "function"},
    name={"type": "string", "pattern": NAME},
    description=_NULLABLE_TEXT,
    parameters={"type": ["object", "null"], "description": "JSON schema of the arguments, which are an object."},
    strict={
        "type": ["boolean", "null"],
        "description": "Constrain the arguments to the schema. Default: true if the schema can be enforced.",
    },
    defer_loading=_DEFER_LOADING,
)
_CUSTOM = object_schema(
    ("type", "name"),
    type={"const": "custom"},
    name={"type": "string", "pattern": NAME},
    description=_NULLABLE_TEXT,
    format=nullable(
        object_schema(("type",), type={"const": "text"}),
        object_schema(
            ("type", "syntax", "definition"),
            type={"const": "grammar"},
            syntax={"enum": ["lark", "regex"]},
            definition=_TEXT,
        ),
    ),
    defer_loading=_DEFER_LOADING,
)
_NAMESPACE = object_schema(
    ("type", "name", "tools"),
    type={"const": "namespace"},
    name={"type": "string", "pattern": NAME},
    description=_NULLABLE_TEXT,
    tools={"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}, "minItems": 1, "maxItems": MAX_TOOLS},
)
_TOOL_SEARCH = object_schema(
    ("type",),
    type={"const": "tool_search"},
    execution={
        "enum": ["client", "server", None],
        "description": "`client`: the model can write a `tool_search_call` item. `server`, the default: not offered.",
    },
    description=_NULLABLE_TEXT,
    parameters={"type": ["object", "null"], "description": "JSON schema of the arguments. Default: a `query`."},
)
_HOSTED = object_schema(("type",), type={"enum": list(HOSTED_TOOLS), "description": "Not offered to the model."})
_TOOL_FILTER = object_schema(
    tool_names={"type": ["array", "null"], "items": _TEXT},
    read_only={"type": ["boolean", "null"], "description": "Tools with the annotation `readOnlyHint`."},
)
_MCP = object_schema(
    ("type", "server_label"),
    type={"const": "mcp"},
    server_label={"type": "string", "pattern": NAME},
    server_url={
        "type": ["string", "null"],
        "description": "URL of an MCP server that the operator allows. Without it, the tool is not offered.",
    },
    server_description=_NULLABLE_TEXT,
    authorization={"type": ["string", "null"], "description": "Sent as a Bearer token; never stored or returned."},
    headers={
        "type": ["object", "null"],
        "additionalProperties": _TEXT,
        "description": "Sent to the server; never stored or returned.",
    },
    allowed_tools=nullable({"type": "array", "items": _TEXT}, _TOOL_FILTER),
    require_approval=nullable(
        {"enum": ["always", "never"]}, object_schema(always=nullable(_TOOL_FILTER), never=nullable(_TOOL_FILTER))
    )
    | {"description": "Tools whose calls the client has to approve. Default: `always`."},
)
_TOOLS = [_FUNCTION, _CUSTOM, _NAMESPACE, _TOOL_SEARCH, _HOSTED]
TOOL_SCHEMA = {"anyOf": [*_TOOLS, _MCP]}
_MORE_TOOLS = {
    "type": "array",
    "items": {"anyOf": _TOOLS},
    "maxItems": MAX_TOOLS,
    "description": "Tools that the model may call from now on.",
}

_ITEM = {
    "anyOf": [
        object_schema(
            ("role", "content"),
            type=_MESSAGE_TYPE,
            role={"enum": ["user", "system", "developer"]},
            content=_USER_CONTENT,
            phase={"type": "null"},
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("role", "content"),
            type=_MESSAGE_TYPE,
            role={"const": "assistant"},
            content=_ASSISTANT_CONTENT,
            phase={"enum": ["commentary", "final_answer", None]},
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            call_id=_TEXT,
            name=_TEXT,
            namespace=_ITEM_NAMESPACE,
            arguments={"type": "string", "description": "A JSON object, as text."},
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("type", "call_id", "output"),
            type={"enum": ["function_call_output", "custom_tool_call_output"]},
            call_id={"type": "string", "description": "Id of the call that this item answers."},
            output=_OUTPUT_CONTENT,
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("type", "call_id", "name", "input"),
            type={"const": "custom_tool_call"},
            call_id=_TEXT,
            name=_TEXT,
            namespace=_ITEM_NAMESPACE,
            input=_TEXT,
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("type", "arguments"),
            type={"const": "tool_search_call"},
            arguments={"type": "object"},
            call_id=_NULLABLE_TEXT,
            execution=_EXECUTION,
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("type", "tools"),
            type={"const": "tool_search_output"},
            tools=_MORE_TOOLS,
            call_id=_NULLABLE_TEXT,
            execution=_EXECUTION,
            id=_ID,
            status=_STATUS,
        ),
        object_schema(
            ("type", "tools"),
            type={"const": "additional_tools"},
            role={"enum": ["developer", None]},
            tools=_MORE_TOOLS,
            id=_ID,
        ),
        object_schema(
            ("type", "server_label", "tools"),
            type={"const": "mcp_list_tools"},
            server_label=_TEXT,
            tools={
                "type": "array",
                "items": object_schema(
                    ("name", "input_schema"),
                    name=_TEXT,
                    description=_NULLABLE_TEXT,
                    input_schema={"type": "object"},
                    annotations={"type": ["object", "null"]},
                ),
            },
            error=_NULLABLE_TEXT,
            id=_ID,
        ),
        object_schema(
            ("type", "server_label", "name", "arguments"),
            type={"enum": ["mcp_call", "mcp_approval_request"]},
            server_label=_TEXT,
            name=_TEXT,
            arguments={"type": "string", "description": "A JSON object, as text."},
            output=_NULLABLE_TEXT,
            error={"type": ["object", "string", "null"]},
            approval_request_id=_NULLABLE_TEXT,
            id=_ID,
            status={"enum": ["in_progress", "completed", "incomplete", "calling", "failed", None]},
        ),
        object_schema(
            ("type", "approval_request_id", "approve"),
            type={"const": "mcp_approval_response"},
            approval_request_id={"type": "string", "description": "Id of the `mcp_approval_request`."},
            approve={"type": "boolean"},
            reason={"type": ["string", "null"], "description": "Told to the model if the call is refused."},
            id=_ID,
        ),
        object_schema(
            ("type",),
            type={"const": "reasoning"},
            summary=_texts("summary_text"),
            content=_texts("reasoning_text"),
            encrypted_content=_NULLABLE_TEXT,
            id=_ID,
            status=_STATUS,
        ),
        object_schema(("id",), type={"enum": ["item_reference", None]}, id=_TEXT),
        object_schema(("type", "encrypted_content"), type={"const": "compaction"}, encrypted_content=_TEXT, id=_ID),
    ]
}
INPUT_SCHEMA = nullable(_TEXT, {"type": "array", "items": _ITEM})
CONVERSATION_SCHEMA = nullable(_TEXT, object_schema(("id",), id=_TEXT))

_NAMED = object_schema(
    ("type", "name"),
    type={"enum": ["function", "custom"]},
    name=_TEXT,
    namespace={"type": ["string", "null"], "description": "Needed where several namespaces have a tool of the name."},
)
_CHOSEN_MCP = object_schema(
    ("type", "server_label"),
    type={"const": "mcp"},
    server_label=_TEXT,
    name={"type": ["string", "null"], "description": "Default: any tool of the server."},
)
_ALLOWED = {
    "anyOf": [
        _NAMED,
        _CHOSEN_MCP,
        object_schema(("type", "name"), type={"const": "namespace"}, name=_TEXT),
        object_schema(("type",), type={"const": "tool_search"}),
    ]
}
CHOICE_SCHEMA = nullable(
    {"enum": ["none", "auto", "required"]},
    _NAMED,
    _CHOSEN_MCP,
    object_schema(
        ("type", "mode", "tools"),
        type={"const": "allowed_tools"},
        mode={"enum": ["auto", "required"]},
        tools={"type": "array", "items": _ALLOWED, "minItems": 1},
    ),
)

TEXT_SCHEMA = object_schema(
    format=nullable(
        object_schema(("type",), type={"enum": ["text", "json_object"]}),
        object_schema(
            ("type", "name", "schema"),
            type={"const": "json_schema"},
            name={"type": "string", "pattern": NAME},
            schema={"type": ["object", "boolean"], "description": "A JSON schema."},
            strict={"type": ["boolean", "null"]},
            description=_NULLABLE_TEXT,
        ),
    )
    | {"description": "`text`, `json_object`, or `json_schema` with a schema."},
    verbosity={
        "enum": ["low", "medium", "high", None],
        "description": "Values other than `medium` are reported as ignored.",
    },
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARY = {
    "enum": ["auto", "concise", "detailed", None],
    "description": "Reported as ignored: reasoning is returned in full.",
}
REASONING_SCHEMA = object_schema(
    effort={
        "enum": [*EFFORTS, None],
        "description": "`none` turns reasoning off; other values are passed to the chat template, or become a token "
        "budget if the template has no such variable.",
    },
    summary=_SUMMARY,
    generate_summary=_SUMMARY,
)
STREAM_OPTIONS_SCHEMA = object_schema(
    include_obfuscation={"enum": [False, None], "description": "Refused if true.", REFUSED: True}
)
