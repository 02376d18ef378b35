"""Client grammars are checked before compilation."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.validation import check_grammar_text, validate_grammar
from syringa.types import Grammar

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})  # without end


def check(text: str) -> None:
    check_grammar_text(Grammar("lark", text), "here")


@pytest.mark.parametrize(
    "text",
    [
        'start: A B "&&&&&&&~~~~~~~" /&&&&&&&&/ // &&&&&&&&&&\nA: /x/ & ~/y/ # ~~~~~~~\nB: /x/ & /y/ & ~/z/',
        "\n".join(["start: T0", *(f"T{each}: /x/ & ~/y/" for each in range(50))]),
        "start: A~3 A~1..4 A~2 A~2 A~2 A~2 A~2 A~2 A~2\nA: /x/",
        'start: e\ne: e e | /[a-z]/ | " "',
        'start: "x" start | "y"',
        'start: "x" (start "," )* start?',
        'start: "x" [start]',
        'start: "x" start{0,3}',
        'start: a | "b"\na: a',
        'start: (a | "b") "c"\na: a',
        'start[max_tokens=3]: one\n?one.2: "x"\n    | one "y"\n%ignore / /',
        'start: %json {"type": "object", "properties": {"&&&&&&&": {}}} "x"',
        "start: nowhere",
        'start: "unclosed',
        "",
    ],
)
def test_ordinary_grammars_pass(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("start: start", "start"),
        ('start: "x" start', "start"),
        ('start: "x" a\na: b | b "y"\nb: "z" (a | b)', "a"),
        ('start: "x" start{1,3}', "start"),
        ('start: "x" start+', "start"),
    ],
)
def test_endless_rules_are_reported_by_name(text: str, name: str) -> None:
    validate_grammar(Grammar("lark", text))  # llguidance finds this only with a tokenizer, as NoExtensionBias
    with pytest.raises(InvalidRequest, match=f"the rule {name} refers to itself"):
        check(text)


@pytest.mark.parametrize(
    ("grammar", "path"),
    [
        (Grammar("lark", f"start: %json {SCHEMA}"), "here.properties.a"),
        (Grammar("lark", f"start: %json\n{SCHEMA} /x/"), "here.properties.a"),
        (Grammar("lark", 'start: %json {"$ref": "#"}'), "here"),
        (
            Grammar("llguidance", f'{{"grammars": [{{"json_schema": {SCHEMA}}}]}}'),
            "here.grammars[0].json_schema.properties.a",
        ),
        (
            Grammar("llguidance", json.dumps({"grammars": [{}, {"lark_grammar": "start: start"}]})),
            "here.grammars[1].lark_grammar",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_nested_grammars_and_schemas_are_checked(grammar: Grammar, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammar_text(grammar, "here")
    assert caught.value.param == path


@pytest.mark.parametrize("value", ["true", '{"grammars": 5}', '{"grammars": [5, {"lark_grammar": 5}]}'])
def test_malformed_grammars_are_left_to_llguidance(value: str) -> None:
    check_grammar_text(Grammar("llguidance", value), "here")


@pytest.mark.parametrize(
    "text",
    [
        "x" * 300_000,
        "start: " + "(" * 100_000,
        "\n".join(f"a{each}: a{each + 1}" for each in range(10_000)) + "\nstart: a0",
        "start: " + " ".join(f"a{each}" for each in range(9_000)) + "".join(f'\na{each}: "x"' for each in range(9_000)),
    ],
    ids=["long", "deep", "a chain", "a wide rule"],
)
def test_hostile_grammars_are_checked_quickly(text: str) -> None:
    started = time.process_time()
    with contextlib.suppress(InvalidRequest):
        check(text)
    assert time.process_time() - started < 3
