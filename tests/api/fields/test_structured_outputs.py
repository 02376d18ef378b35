"""Tests of the constraints of vLLM and llama.cpp: what each field lets the model write, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.api.fields.grammars import choice_grammar, read_whitespace_pattern, schema_grammar
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.types import GrammarKind
from tests.chat_models import plain_model, reasoning_model
from tests.client import client
from tests.fake_engine import FakeEngine
from tests.prompt.grammar.matching import byte_tokenizer, follows
from tests.tiers import examples

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ANN, ANN_WITH_AGE, ANN_SPACED = '{"name":"Ann"}', '{"name":"Ann","age":7}', '{"name": "Ann"}'
REFERENCE = {"$ref": "#/$defs/p", "$defs": {"p": PERSON}}
BOTH = {"allOf": [PERSON, {"properties": {"age": {"type": "integer"}}}]}
GBNF, LARK = 'root ::= "yes" | "no" [!]{2}', 'start: "yes" | "no" /!{2}/'
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]}
FORMAT = {"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}


def outputs(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


async def constraint(body: dict[str, Any], path: str = "/v1/completions", model: ServedModel | None = None) -> Any:
    """Return the grammar that the engine gets, and the fields reported as ignored."""
    engine = FakeEngine("x")
    async with client(engine, model=model or plain_model()) as http:
        answer = await http.post(path, json=PATHS[path] | body)
    assert answer.status_code == 200, answer.text
    return engine.requests[0].sampling.grammar, answer.headers.get("x-syringa-ignored")


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (outputs(json=PERSON), [ANN], [ANN_SPACED, ANN_WITH_AGE, "hi"]),
    (outputs(json=json.dumps(PERSON)), [ANN], [ANN_SPACED, "hi"]),
    (outputs(json=PERSON, whitespace_pattern=" ?"), [ANN, ANN_SPACED], ['{"name":  "Ann"}', '{"name":\n"Ann"}']),
    (outputs(json=PERSON, whitespace_pattern=r"[\s]{2}"), [ANN, '{"name":\n\t"Ann"}'], [ANN_SPACED]),
    (outputs(json=PERSON, disable_any_whitespace=True), [ANN], [ANN_SPACED]),
    (outputs(json=PERSON, disable_additional_properties=False), [ANN, ANN_WITH_AGE], []),
    (outputs(json=PERSON, disable_additional_properties=True), [ANN], [ANN_WITH_AGE]),
    (
        outputs(json={"$ref": "#/$defs/p", "$defs": {"p": PERSON}}, disable_additional_properties=True),
        [ANN],
        ["{}"],
    ),
    (outputs(regex=r"\d{3}-[ab]+"), ["555-ab"], ["555-", "x555-a"]),
    (outputs(regex="^a/b$"), ["a/b"], ["a"]),
    (outputs(choice=["C++", "C", '"', "<end>"]), ["C++", "C", '"', "<end>"], ["C+", "", "CC"]),
    (outputs(grammar=LARK), ["yes", "no!!"], ["no", "maybe"]),
    (outputs(grammar=GBNF), ["yes", "no!!"], ["no", "maybe"]),
    (outputs(json_object=True), ['{"a":1}', "{}"], ["[]", '{"a": 1}']),
    (outputs(json_object=True, whitespace_pattern=" "), ['{"a": 1}'], ['{"a":  1}']),
    (outputs(json=PERSON, json_object=False), [ANN], ["{}"]),
    (outputs(structural_tag=TAG), ["hi <f>1</f> you"], ["hi <f>x</f>"]),
    (outputs(structural_tag=json.dumps(FORMAT)), ["hello"], ["hell"]),
    ({"guided_json": PERSON}, [ANN], [ANN_SPACED, ANN_WITH_AGE]),
    ({"guided_json": json.dumps(PERSON)}, [ANN], [ANN_SPACED]),
    ({"guided_json": PERSON, "guided_whitespace_pattern": " "}, [ANN, ANN_SPACED], ['{"name":\n"Ann"}']),
    ({"guided_regex": "a+"}, ["aa"], ["", "b"]),
    ({"guided_choice": ["a", "ab"]}, ["a", "ab"], ["b", ""]),
    ({"guided_grammar": GBNF}, ["yes"], ["no"]),
    ({"guided_grammar": LARK}, ["yes"], ["no"]),
    ({"grammar": GBNF}, ["yes"], ["no"]),
    ({"grammar": LARK}, ["yes"], ["no"]),
    ({"grammar": "", "guided_regex": "a+"}, ["aa"], ["b"]),
    ({"json_schema": PERSON}, [ANN], [ANN_WITH_AGE, "1"]),
    ({"json_schema": {"const": "42"}}, ['"42"'], ["42"]),
    ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, ['"42"'], ["42", "{}"]),
    ({"response_format": {"type": "json_object", "schema": {}}}, ["{}"], ["[]"]),
    ({"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " "}, ['{"a": 1}'], ['{"a":\n1}']),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, ["aa"], ["b"]),
    ({"response_format": {"type": "structural_tag", **TAG}}, ["hi <f>1</f> you"], ["hi <f>x</f>"]),
    ({"response_format": FORMAT}, ["hello"], ["hell"]),
]


@pytest.mark.parametrize(("body", "accepted", "refused"), CASES, ids=lambda value: str(value)[:90])
async def test_constraint_accepts_what_its_field_says(
    body: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    grammar, ignored = await constraint(body)
    assert ignored is None
    for text in accepted:
        assert follows(grammar, text), text
    for text in refused:
        assert not follows(grammar, text), text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("body", [outputs(choice=["a"]), {"guided_regex": "a"}, {"grammar": 'root ::= "a"'}], ids=str)
async def test_constraint_applies_to_chat_and_responses(path: str, body: dict[str, Any]) -> None:
    grammar, ignored = await constraint(body, path)
    assert ignored is None
    assert follows(grammar, "a")
    assert not follows(grammar, "b")


def documented_examples() -> list[dict[str, Any]]:
    section = (Path(__file__).parents[3] / "docs" / "completions.md").read_text().split("## Structured output")[1]
    decoder, found = json.JSONDecoder(), []
    for block in re.findall(r"```json\n(.*?)```", section, re.DOTALL):
        while block.strip():
            value, end = decoder.raw_decode(block)
            found.append(value)
            block = block[end:].lstrip()
    return found


async def test_documented_examples_are_accepted() -> None:
    documented = documented_examples()
    kinds = {each["grammar"]["type"] for each in documented if isinstance(each.get("grammar"), dict)}
    assert kinds == set(get_args(GrammarKind))
    for body in documented:
        grammar, ignored = await constraint(body)
        assert grammar is not None
        assert ignored is None


async def test_reasoning_is_free_before_a_constraint() -> None:
    tokenizer = byte_tokenizer()
    path = "/v1/chat/completions"
    for body in (outputs(choice=["yes", "no"]), {"guided_regex": "yes|no"}, {"grammar": 'root ::= "yes" | "no"'}):
        grammar, _ = await constraint(body | {"thinking_token_budget": -1}, path, reasoning_model())
        # The markers are tokens 1 and 2 of this model, control characters to the tokenizer of the test.
        assert grammar.kind == "llguidance"
        assert "<[1]>" in grammar.value
        assert follows(grammar, "yes", tokenizer)
        assert not follows(grammar, "maybe", tokenizer)


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({**outputs(json={}), "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (outputs(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
        (outputs(regex="a", disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
        (outputs(choice=["a"], disable_additional_properties=True), "structured_outputs.disable_additional_properties"),
        (outputs(choice=["a"], disable_additional_properties=False, disable_any_whitespace=False), None),
        (outputs(choice=["a"], disable_fallback=True), "structured_outputs.disable_fallback"),
        (outputs(json={"uniqueItems": True}), "structured_outputs.json.uniqueItems"),
        ({"guided_json": {"type": "array", "contains": {}}}, "guided_json.contains"),
        ({"json_schema": {"requried": []}}, "json_schema.requried"),
        (outputs(structural_tag={**TAG, "zork": 1}), "structured_outputs.structural_tag.zork"),
        (
            outputs(structural_tag={**TAG, "structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}]}),
            "structured_outputs.structural_tag.structures[0].schema.not",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "format": {}}}, "response_format.format"),
    ],
    ids=lambda value: str(value)[:90],
)
async def test_what_has_no_effect_is_reported(body: dict[str, Any], ignored: str | None) -> None:
    assert (await constraint(body))[1] == ignored


DEEP = json.loads('{"items":' * 300 + "{}" + "}" * 300)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (outputs(), "structured_outputs", "expected one of json, regex, choice"),
        (outputs(json_object=False), "structured_outputs", "expected one of json, regex, choice"),
        (outputs(whitespace_pattern=" "), "structured_outputs", "expected one of json, regex, choice"),
        (outputs(json="{"), "structured_outputs.json", "expected a JSON object, or its text"),
        (outputs(json=[1]), "structured_outputs.json", "expected a JSON object, or its text"),
        (outputs(json={"type": "hiccup"}), "structured_outputs.json", "hiccup"),
        (outputs(json={"$ref": "#"}), "structured_outputs.json", "refers to itself"),
        (outputs(json=DEEP), "structured_outputs.json", "nested too deeply"),
        (outputs(json={"$defs": {"unused": DEEP}}), "structured_outputs.json", "Invalid grammar"),
        (outputs(regex="("), "structured_outputs.regex", "regex"),
        (outputs(regex=5), "structured_outputs.regex", "expected str"),
        (outputs(choice=[]), "structured_outputs.choice", "length >= 1"),
        (outputs(choice=["a", 5]), "structured_outputs.choice[1]", "expected str"),
        (outputs(choice="a"), "structured_outputs.choice", "expected array"),
        (outputs(choice=["x" * 200_001]), "structured_outputs.choice", "at most 200000 characters"),
        (outputs(grammar="root ::= x"), "structured_outputs.grammar", "line 1, at 'x': the rule x is not defined"),
        (outputs(grammar="start: x"), "structured_outputs.grammar", "x"),
        (outputs(grammar="what is this"), "structured_outputs.grammar", "Invalid grammar"),
        (outputs(grammar='root ::= "a" root'), "structured_outputs.grammar", "refers to itself without end"),
        (outputs(grammar="root ::= " + "x" * 200_000), "structured_outputs.grammar", "at most 200000 characters"),
        (outputs(json_object="yes"), "structured_outputs.json_object", "expected bool"),
        (outputs(json={}, whitespace_pattern="x"), "structured_outputs.whitespace_pattern", "spaces, tabs and line"),
        (
            outputs(json={}, whitespace_pattern=" ", disable_any_whitespace=True),
            "structured_outputs.whitespace_pattern",
            "structured_outputs.disable_any_whitespace",
        ),
        (outputs(structural_tag="not json"), "structured_outputs.structural_tag", "expected a JSON object"),
        (outputs(json=BOTH, disable_additional_properties=True), "structured_outputs.json", "Invalid grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "guided_regex"),
        (outputs(regex="a", choice=["b"]), "structured_outputs.regex", "structured_outputs.choice"),
        (outputs(json={}, json_object=True), "structured_outputs.json", "structured_outputs.json_object"),
        ({"guided_json": {}, **outputs(regex="a")}, "structured_outputs.regex", "guided_json"),
        ({"grammar": "x", "json_schema": {}}, "grammar", "json_schema"),
        ({"guided_choice": ["a"], "guided_grammar": "x"}, "guided_choice", "guided_grammar"),
        ({"guided_choice": []}, "guided_choice", "length >= 1"),
        ({"guided_json": 5}, "guided_json", "expected a JSON object, or its text"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern", "spaces, tabs"),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "the bracket is not closed"),
        ({"grammar": 5}, "grammar", "expected an object"),
        ({"grammar": "root ::= ("}, "grammar", "the bracket is not closed"),
        ({"json_schema": 123}, "json_schema", "expected a JSON object, or its text"),
        ({"response_format": {"type": "json_object", "schema": 0}}, "response_format.schema", "expected a JSON"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema", "expected a JSON"),
        ({"response_format": {"type": "json_object", "schema": {"type": 1}}}, "response_format.schema", "type"),
        ({"response_format": {"type": "sound"}}, "response_format.type", "expected one of text, json_object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "expected format, or structures"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "token"}}},
            "response_format.format.type",
            "'token'",
        ),
    ],
    ids=lambda value: str(value)[:90],
)
async def test_invalid_constraint_is_refused_with_its_path(body: dict[str, Any], param: str, message: str) -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=PATHS["/v1/completions"] | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
    assert not engine.requests


async def test_response_refuses_constraint_beside_text_format() -> None:
    async with client(model=plain_model()) as http:
        text = {"format": {"type": "json_object"}}
        answer = await http.post("/v1/responses", json={"input": "hi", "text": text, **outputs(regex="a")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs.regex"
    assert "text.format" in answer.json()["error"]["message"]


TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
FLAT_TOOLS = {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_json_and_choices_apply_to_text_beside_tools(path: str) -> None:
    tools = FLAT_TOOLS if path == "/v1/responses" else TOOLS
    for body in (outputs(json=PERSON), {"guided_json": PERSON}, {"json_schema": PERSON}):
        grammar, _ = await constraint(body | tools, path)
        assert follows(grammar, ANN)
        assert follows(grammar, '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        assert not follows(grammar, "hi")
    grammar, _ = await constraint(outputs(choice=["yes"]) | tools, path)
    assert follows(grammar, "yes")
    assert not follows(grammar, "no")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "a"},
        {"guided_grammar": LARK},
        {"grammar": GBNF},
        outputs(regex="a"),
        outputs(structural_tag=TAG),
    ],
    ids=str,
)
async def test_constraints_that_could_write_calls_are_refused_beside_tools(path: str, body: dict[str, Any]) -> None:
    async with client(model=plain_model()) as http:
        tools = FLAT_TOOLS if path == "/v1/responses" else TOOLS
        answer = await http.post(path, json=PATHS[path] | body | tools)
    assert answer.status_code == 400, answer.text
    name = next(iter(body))
    if name == "structured_outputs":
        name += "." + next(iter(body[name]))
    assert answer.json()["error"]["param"] == name
    assert answer.json()["error"]["message"] == f"{name} and tools cannot be combined."


async def test_completion_refuses_any_constraint_beside_tools() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi", **TOOLS, "guided_choice": ["a"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "guided_choice and tools cannot be combined."


@pytest.mark.parametrize("pattern", ["", " ", r"[ \n]?", r"[\n\t ]*", r"(?: |\n\t){0,2}", r"\s*", r"[\s]", r"\x20+"])
def test_whitespace_pattern_of_whitespace_is_accepted(pattern: str) -> None:
    read_whitespace_pattern(pattern, "p")


@pytest.mark.parametrize(
    "pattern", ["x?", ".", r"\S", "[^ ]", r"\w*", "[ -a]", "[?]", "5", r"\u0041", " " * 201, "(", " )"]
)
def test_whitespace_pattern_of_other_text_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="spaces, tabs and line breaks"):
        read_whitespace_pattern(pattern, "p")


VALUE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
}
PARTS = ["{", '"a"', ":", "1", ",", '"b"', ":", "[", "2", ",", "3", "]", "}"]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(["", " ", " ?", r"[ \n]", r"\n {0,2}", r"\s+", r"(?: |\n\n)"]),
    st.lists(st.sampled_from(["", "", " ", "\n", "  ", "\n ", "\n\n"]), min_size=12, max_size=12),
)
def test_whitespace_is_absent_or_matches_its_pattern(pattern: str, gaps: list[str]) -> None:
    grammar = schema_grammar(VALUE, "p", ignored=[], whitespace=read_whitespace_pattern(pattern, "p"))
    text = "".join(part + gap for part, gap in zip(PARTS, [*gaps, ""], strict=True))
    assert follows(grammar, text) == all(not gap or re.fullmatch(pattern, gap) for gap in gaps)


TEXTS = st.text('ab"\\\n é<\x00\x7f', max_size=4)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=6), TEXTS)
def test_choice_accepts_its_texts_and_no_other(choices: list[str], other: str) -> None:
    grammar = choice_grammar(choices, "p")
    for each in (*choices, other):
        assert follows(grammar, each) == (each in choices)
