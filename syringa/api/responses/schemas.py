"""The published schemas of fields that are read by hand: items, tools and what chooses between them."""

from __future__ import annotations

from typing import Any

from syringa.api.fields.annotations import REFUSED, nullable, record

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
HONOURED_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url")
EMPTY_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

_TEXT: dict[str, Any] = {"type": "string"}
_MAYBE: dict[str, Any] = {"type": ["string", "null"]}
_STATUS = {"enum": ["in_progress", "completed", "incomplete", None]}
LONGEST_ID = 256
_ID = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": LONGEST_ID,
    "description": "Given one where it has none.",
}


def _part(type_: str, key: str) -> dict[str, Any]:
    return record(("type", key), type={"const": type_}, **{key: _TEXT})


_IMAGE = record(
    ("type", "image_url"),
    type={"const": "input_image"},
    image_url={"type": "string", "description": "An http(s) address, or a `data:` URI in base64."},
    detail={"enum": ["auto", "low", "high", None]},
    file_id={"type": "null", REFUSED: True},
)


def _content(*parts: dict[str, Any]) -> dict[str, Any]:
    items = {"anyOf": list(parts)} if len(parts) > 1 else parts[0]
    return {"anyOf": [_TEXT, {"type": "array", "items": items, "minItems": 1}]}


_SPOKEN = _content(_part("input_text", "text"), _part("output_text", "text"), _IMAGE)
_SAID = _content(_part("output_text", "text"), _part("input_text", "text"), _part("refusal", "refusal"))
_OUTPUT = _content(_part("input_text", "text"))
_MESSAGE = {"enum": ["message", None]}


def _texts(type_: str) -> dict[str, Any]:
    return {"type": ["array", "null"], "items": _part(type_, "text")}


_ITEM = {
    "anyOf": [
        record(
            ("role", "content"),
            type=_MESSAGE,
            role={"enum": ["user", "system", "developer"]},
            content=_SPOKEN,
            phase={"type": "null"},
            id=_ID,
            status=_STATUS,
        ),
        record(
            ("role", "content"),
            type=_MESSAGE,
            role={"const": "assistant"},
            content=_SAID,
            phase={"enum": ["commentary", "final_answer", None]},
            id=_ID,
            status=_STATUS,
        ),
        record(
            ("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            call_id=_TEXT,
            name=_TEXT,
            arguments={"type": "string", "description": "The JSON text of an object."},
            id=_ID,
            status=_STATUS,
        ),
        record(
            ("type", "call_id", "output"),
            type={"enum": ["function_call_output", "custom_tool_call_output"]},
            call_id={"type": "string", "description": "The id of the call that it answers."},
            output=_OUTPUT,
            id=_ID,
            status=_STATUS,
        ),
        record(
            ("type", "call_id", "name", "input"),
            type={"const": "custom_tool_call"},
            call_id=_TEXT,
            name=_TEXT,
            input=_TEXT,
            id=_ID,
            status=_STATUS,
        ),
        record(
            ("type",),
            type={"const": "reasoning"},
            summary=_texts("summary_text"),
            content=_texts("reasoning_text"),
            encrypted_content=_MAYBE,
            id=_ID,
            status=_STATUS,
        ),
        record(("id",), type={"enum": ["item_reference", None]}, id=_TEXT),
        record(("type", "encrypted_content"), type={"const": "compaction"}, encrypted_content=_TEXT, id=_ID),
    ]
}
INPUT_SCHEMA = nullable(_TEXT, {"type": "array", "items": _ITEM})
CONVERSATION_SCHEMA = nullable(_TEXT, record(("id",), id=_TEXT))

_FUNCTION = record(
    ("type", "name"),
    type={"const": "function"},
    name={"type": "string", "pattern": NAME},
    description=_MAYBE,
    parameters={"type": ["object", "null"], "description": "A JSON schema of the arguments: an object."},
    strict={"type": ["boolean", "null"], "description": "Hold the arguments to the schema; absent: if it can be."},
)
_CUSTOM = record(
    ("type", "name"),
    type={"const": "custom"},
    name={"type": "string", "pattern": NAME},
    description=_MAYBE,
    format=nullable(
        record(("type",), type={"const": "text"}),
        record(
            ("type", "syntax", "definition"),
            type={"const": "grammar"},
            syntax={"enum": ["lark", "regex"]},
            definition=_TEXT,
        ),
    ),
)
TOOL_SCHEMA = {"anyOf": [_FUNCTION, _CUSTOM]}
_NAMED = record(("type", "name"), type={"enum": ["function", "custom"]}, name=_TEXT)
CHOICE_SCHEMA = nullable(
    {"enum": ["none", "auto", "required"]},
    _NAMED,
    record(
        ("type", "mode", "tools"),
        type={"const": "allowed_tools"},
        mode={"enum": ["auto", "required"]},
        tools={"type": "array", "items": _NAMED, "minItems": 1},
    ),
)

TEXT_SCHEMA = record(
    format=nullable(
        record(("type",), type={"enum": ["text", "json_object"]}),
        record(
            ("type", "name", "schema"),
            type={"const": "json_schema"},
            name={"type": "string", "pattern": NAME},
            schema={"type": ["object", "boolean"], "description": "A JSON schema."},
            strict={"type": ["boolean", "null"]},
            description=_MAYBE,
        ),
    )
    | {"description": "What the answer must be."},
    verbosity={"enum": ["low", "medium", "high", None], "description": "Any but `medium` is named as ignored."},
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARY = {"enum": ["auto", "concise", "detailed", None], "description": "Named as ignored: thoughts come whole."}
REASONING_SCHEMA = record(
    effort={
        "enum": [*EFFORTS, None],
        "description": "`none`: no thought; else told to the template, or where it has no word for it, a budget.",
    },
    summary=_SUMMARY,
    generate_summary=_SUMMARY,
)
STREAM_OPTIONS_SCHEMA = record(
    include_obfuscation={"enum": [False, None], "description": "Refused where true.", REFUSED: True}
)
