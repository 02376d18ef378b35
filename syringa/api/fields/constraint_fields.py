"""The wire types of the fields that constrain the output, and their schemas."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.fields.schema import IGNORED, doc, ignored_field, nullable, object_schema

_TEXT = {"type": ["string", "null"]}
_SCHEMA = {"type": ["object", "boolean"], "description": "A JSON schema."}
_SCHEMA_OR_TEXT = {"type": ["object", "boolean", "string"], "description": "A JSON schema, or its text."}
_BOOLEAN = {"type": ["boolean", "null"]}
_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_NULLABLE_SCHEMA = {"type": ["object", "boolean", "null"], "description": "A JSON schema."}
_STRUCTURES = object_schema(("begin", "end"), begin={"type": "string"}, schema=_NULLABLE_SCHEMA, end={"type": "string"})
_TAG = {
    "format": {"type": ["object", "null"], "description": "A format of xgrammar's structural tags."},
    "structures": nullable({"type": "array", "items": _STRUCTURES, "minItems": 1}),
    "triggers": nullable(_STRINGS),
}

GRAMMAR_SCHEMA = nullable(
    {"type": "string"},
    object_schema(("type", "value"), type={"enum": ["regex", "lark"]}, value={"type": "string"}),
    object_schema(
        ("type", "value"),
        type={"enum": ["json_schema", "llguidance"]},
        value={"type": ["object", "boolean", "string"], "description": "A JSON object, or its text."},
    ),
)
FORMAT_SCHEMA = {
    "anyOf": [
        object_schema(("type",), type={"const": "text"}),
        object_schema(("type",), type={"const": "json_object"}, schema=_NULLABLE_SCHEMA),
        object_schema(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=object_schema(
                ("schema",), name=_TEXT, description=_TEXT, schema=_SCHEMA, strict={"type": ["boolean", "null"]}
            ),
        ),
        object_schema(("type",), type={"const": "structural_tag"}, **_TAG),
    ]
}
STRUCTURED_OUTPUTS_SCHEMA = object_schema(
    json=nullable({"type": ["object", "boolean"]}, {"type": "string"}) | {"description": "A JSON schema, or its text."},
    regex=_TEXT | {"description": "A regular expression, which the whole output matches."},
    choice=nullable(_STRINGS) | {"description": "Texts, one of which is the output."},
    grammar=_TEXT | {"description": "A Lark or GBNF grammar."},
    json_object=_BOOLEAN | {"description": "Any JSON object."},
    structural_tag=nullable(object_schema((), **_TAG), {"type": "string"})
    | {"description": "Free text with structured parts between markers, as an object or its JSON text."},
    whitespace_pattern=_TEXT
    | {"description": "A regular expression for whitespace between the parts of JSON. Default: there is none."},
    disable_any_whitespace=_BOOLEAN
    | {"description": "JSON has no whitespace, as by default; cannot be combined with `whitespace_pattern`."},
    disable_additional_properties=_BOOLEAN
    | {
        "description": "Objects have the declared properties only, unless their schema sets `additionalProperties`; "
        "false: they may have others. Default: as true, but not where several schemas apply to an object."
    },
    disable_fallback=_BOOLEAN | {"description": "There is one backend; reported as ignored.", IGNORED: True},
)


class ConstraintFields(msgspec.Struct, kw_only=True):
    """The fields that constrain the output, of which a request has one at most."""

    grammar: Annotated[
        Any,
        doc(
            "Constraint on the output: the text of a Lark or GBNF grammar, or an object with its `type` and `value`: a "
            "regular expression, a JSON schema, or a Lark or llguidance grammar.",
            **GRAMMAR_SCHEMA,
        ),
    ] = None
    response_format: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=FORMAT_SCHEMA)] | None,
        doc(
            "`text`, `json_object`, `json_schema` with a schema, or `structural_tag`. With `strict`, a schema that "
            "cannot be fully enforced is refused. `json_object` may have a `schema`, as in llama.cpp."
        ),
    ] = None
    json_schema: Annotated[Any, doc("A JSON schema, or its text, as in llama.cpp.", **nullable(_SCHEMA_OR_TEXT))] = None
    structured_outputs: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=STRUCTURED_OUTPUTS_SCHEMA)] | None,
        doc("vLLM's constraints: one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`."),
    ] = None
    guided_json: Annotated[Any, doc("Same as `structured_outputs.json`.", **nullable(_SCHEMA_OR_TEXT))] = None
    guided_regex: Annotated[str | None, doc("Same as `structured_outputs.regex`.")] = None
    guided_choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None, doc("Same as `structured_outputs.choice`.")
    ] = None
    guided_grammar: Annotated[str | None, doc("Same as `structured_outputs.grammar`.")] = None
    guided_whitespace_pattern: Annotated[
        str | None, doc("Regular expression for whitespace in the JSON of other fields than `structured_outputs`.")
    ] = None
    guided_decoding_backend: Annotated[
        str | None, ignored_field("There is one backend, llguidance; reported as ignored.")
    ] = None


class GrammarField(msgspec.Struct, kw_only=True):
    """A constraint on the output. For `json_schema` and `llguidance` the value is a JSON object or its text."""

    type: str
    value: Any


class ResponseFormat(msgspec.Struct, kw_only=True):
    """A format by its type. The other fields belong to one type each."""

    type: str
    json_schema: Any = None
    schema: Any = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    json: Any = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
