"""JSON schemas of fields that are validated by hand: input items, tools, text format and reasoning."""

from __future__ import annotations

from typing import Any

from syringa.api.fields.schema import REFUSED, nullable, object_schema

NAME = "^[a-zA-Z0-9_-]{1,64}$"
ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
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
            input=_TEXT,
            id=_ID,
            status=_STATUS,
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
)
TOOL_SCHEMA = {"anyOf": [_FUNCTION, _CUSTOM]}
_NAMED = object_schema(("type", "name"), type={"enum": ["function", "custom"]}, name=_TEXT)
CHOICE_SCHEMA = nullable(
    {"enum": ["none", "auto", "required"]},
    _NAMED,
    object_schema(
        ("type", "mode", "tools"),
        type={"const": "allowed_tools"},
        mode={"enum": ["auto", "required"]},
        tools={"type": "array", "items": _NAMED, "minItems": 1},
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
