"""The keyword tables match the installed version of llguidance."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from syringa.errors import InvalidRequest
from syringa.grammar import parser_limits, to_llguidance
from syringa.prompt.grammar.schema import ENFORCED_FORMATS, SUPPORTED_KEYWORDS, UNENFORCED_KEYWORDS, enforceable_schema
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar

VALUES: dict[str, Any] = {
    "uniqueItems": True,
    "minContains": 1,
    "maxContains": 1,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "$dynamicAnchor": "a",
    "$recursiveAnchor": True,
}
OTHER_FORMATS = (
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex "
    "int32 int64 float double byte binary password base64 path"
)


def compiles(schema: Any) -> bool:
    try:
        validate_grammar(Grammar("json_schema", json.dumps(schema)))
    except InvalidRequest:
        return False
    return True


def allows(schema: Any, value: Any) -> bool:
    """Return whether the grammar of the schema accepts the value as JSON."""
    text = to_llguidance(Grammar("json_schema", json.dumps(schema)))
    matcher = LLMatcher(LLTokenizer("byte"), text, limits=parser_limits())
    assert not matcher.get_error()
    tokens = list(json.dumps(value, separators=(",", ":")).encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("keyword", UNENFORCED_KEYWORDS)
def test_unenforced_keywords_are_rejected_by_llguidance(keyword: str) -> None:
    assert not compiles({keyword: VALUES.get(keyword, {"type": "string"})})


@pytest.mark.parametrize("name", sorted(ENFORCED_FORMATS))
def test_known_formats_compile(name: str) -> None:
    assert compiles({"type": "string", "format": name})


@pytest.mark.parametrize("name", OTHER_FORMATS.split())
def test_unknown_formats_do_not_compile(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert not compiles(schema)
    assert enforceable_schema(schema) == ({"type": "string"}, [".format"], [])


ENFORCED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"type": "integer", "minimum": 3}, 3, 2),
    ({"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    ({"type": "number", "maximum": 3}, 3, 3.5),
    ({"type": "number", "exclusiveMaximum": 3}, 2.5, 3),
    ({"type": "integer", "multipleOf": 3}, 6, 7),
    ({"type": "string", "minLength": 2}, "ab", "a"),
    ({"type": "string", "maxLength": 1}, "a", "ab"),
    ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    ({"type": "string", "format": "date"}, "2024-02-03", "2024-02-33"),
    ({"type": "array", "minItems": 1}, [1], []),
    ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    ({"type": "array", "prefixItems": [{"type": "string"}]}, ["a"], [1]),
    ({"type": "array", "items": {"type": "string"}}, ["a"], [1]),
    ({"type": "array", "items": [{}], "additionalItems": False}, [1], [1, 2]),
    ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    ({"type": "object", "required": ["z"]}, {"z": 1}, {}),
    ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": "x"}, {"a": 1}),
    ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, {"ab": "x"}, {"ab": 1}),
    ({"type": "object", "additionalProperties": False}, {}, {"a": 1}),
    ({"enum": ["a", 1]}, 1, 2),
    ({"const": "a"}, "a", "b"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, 1, "a"),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}}, 1, "a"),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "integer"}}}, 1, "a"),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda value: str(value)[:50])
def test_supported_keywords_are_enforced(schema: dict[str, Any], good: Any, bad: Any) -> None:
    kept, left_out, unknown = enforceable_schema(schema)
    if "oneOf" in schema:  # means the same if its alternatives exclude each other
        schema = {"anyOf": schema["oneOf"]}
    assert (kept, left_out, unknown) == (schema, [], [])
    assert allows(kept, good)
    assert not allows(kept, bad)


def test_every_supported_keyword_is_tested_or_an_annotation() -> None:
    seen = {key for schema, *_ in ENFORCED for key in (*schema, *json.dumps(schema).split('"'))}
    silent = {
        *("$schema", "$id", "id", "$comment", "$vocabulary", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
        *("contentEncoding", "contentMediaType", "contentSchema"),  # annotations, according to the specification
    }
    assert seen >= SUPPORTED_KEYWORDS - silent


LEFT_OUT: list[tuple[Any, list[str]]] = [
    ({"type": "array", "uniqueItems": True}, [".uniqueItems"]),
    ({"contains": {"type": "integer"}, "minContains": 2}, [".contains", ".minContains"]),
    ({"not": {"type": "string"}}, [".not"]),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, [".if", ".then"]),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, [".propertyNames"]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, [".dependentRequired"]),
    ({"type": "object", "unevaluatedProperties": False}, [".unevaluatedProperties"]),
    ({"type": "string", "pattern": "^(?!a)"}, [".pattern"]),
    ({"type": "string", "pattern": "(?<=a)b"}, [".pattern"]),
    ({"type": "string", "pattern": r"\bword\b"}, [".pattern"]),
    ({"type": "string", "pattern": r"(a)\1"}, [".pattern"]),
    ({"type": "object", "patternProperties": {"^(?=a)": {}, "^b": {}}}, [".patternProperties.^(?=a)"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [".oneOf"]),
    ({"oneOf": [{"minimum": 1}, {"maximum": 3}], "anyOf": [{"type": "integer"}]}, [".oneOf"]),
    ({"properties": {"a": {}}, "minProperties": 1}, [".minProperties"]),
    ({"properties": {"a": {"not": {}}, "not": {"type": "null"}}}, [".properties.a.not"]),
    ({"type": "array", "items": {"anyOf": [{}, {"format": "zork"}]}}, [".items.anyOf[1].format"]),
    ({"prefixItems": [{"not": {}}], "items": {"not": {}}}, [".prefixItems[0].not", ".items.not"]),
    ({"additionalProperties": {"uniqueItems": True}}, [".additionalProperties.uniqueItems"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"not": {}}}}, [".$defs.a/b.not"]),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "not": {}}}}, [".$defs.a.not"]),
    ({"properties": {"me": {"$ref": "#"}}, "not": {}}, [".not"]),
]


@pytest.mark.parametrize(("schema", "paths"), LEFT_OUT, ids=lambda value: str(value)[:60])
def test_unenforceable_keywords_are_removed_and_reported(schema: Any, paths: list[str]) -> None:
    before = json.dumps(schema)
    assert not compiles(schema)
    kept, left_out, unknown = enforceable_schema(schema)
    assert (left_out, unknown) == (paths, [])
    assert compiles(kept)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"type": "string", "uniqueItems": True, "propertyNames": {"maxLength": 1}},
        {"type": ["string", "null"], "contains": {}},
        {"type": "integer", "format": "int32"},
        {"not": False},
        {"if": {"type": "string"}},
        {"then": {"type": "string"}, "else": False},
        {"minContains": 3},
        {"dependentRequired": {}, "unevaluatedProperties": True, "propertyNames": {}},
        {"$dynamicAnchor": "x"},
        {"type": "integer", "$defs": {"unused": {"not": {}}}},
        {"type": "string", "title": "t", "default": 1, "examples": [{"not": 1}], "x-order": 1, "$comment": "c"},
        {"const": {"not": 1}},
    ],
    ids=str,
)
def test_keywords_without_effect_are_not_reported(schema: Any) -> None:
    kept, left_out, unknown = enforceable_schema(schema)
    assert (left_out, unknown) == ([], [])
    assert compiles(kept)


def test_only_overlapping_one_of_is_reported() -> None:
    apart = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    over = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    kept, left_out, _ = enforceable_schema({"properties": {"a": apart, "b": over, "c": apart}})
    assert left_out == [".properties.b.oneOf"]
    assert kept["properties"]["a"] == {"anyOf": apart["oneOf"]}
    assert kept["properties"]["b"] == {"anyOf": over["oneOf"]}


def test_guidance_options_are_removed_and_reported() -> None:
    inner = {"type": "object", "x-guidance": {"lenient": True}, "x-order": 1}
    kept, left_out, unknown = enforceable_schema({"properties": {"a": inner}, "x-guidance": {"lenient": True}})
    assert kept == {"properties": {"a": {"type": "object", "x-order": 1}}}
    assert (left_out, unknown) == ([".x-guidance", ".properties.a.x-guidance"], [])


def test_unknown_keywords_are_reported() -> None:
    assert enforceable_schema({"type": "object", "properties": {"a": {"nullable": True}}, "requried": []})[2] == [
        ".requried",
        ".properties.a.nullable",
    ]


@pytest.mark.parametrize("schema", [True, False, {}, {"type": 5}, {"properties": 5, "items": 5, "anyOf": 5, "$ref": 5}])
def test_malformed_schemas_pass_unchanged(schema: Any) -> None:
    assert enforceable_schema(schema) == (schema, [], [])


def test_deep_schema_is_rejected() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest):
        enforceable_schema(schema)


def test_many_suspect_patterns_are_checked_quickly() -> None:
    names = [str(each) for each in range(4000)]
    schema = {"properties": {each: {"type": "string", "pattern": f"^(?!{each})"} for each in names}, "required": names}
    assert len(enforceable_schema(schema)[1]) == 4000
    many = {"properties": {str(each): {"oneOf": [{"type": "integer"}, {"type": "number"}]} for each in range(400)}}
    assert len(enforceable_schema(many)[1]) == 400
    # `(?i)\p{L}` expands to kilobytes: a pattern is not parsed if it is long.
    long = {"type": "string", "pattern": r"[$]x(?i)" + r"\p{L}" * 100_000}
    assert enforceable_schema(long)[1] == [".pattern"]
