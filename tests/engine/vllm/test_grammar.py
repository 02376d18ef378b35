"""Grammars in the terms of vLLM's llguidance backend, which are compiled here as vLLM compiles them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from syringa.engine.vllm.grammar import to_structured_outputs
from syringa.errors import InvalidRequest
from syringa.types import Grammar

SPECIAL = {"<|im_end|>": 2}


def matches(grammar: Grammar, text: str) -> bool:
    """Return whether a text satisfies a grammar, after its conversion for vLLM."""
    ((kind, value),) = to_structured_outputs(grammar, SPECIAL).items()
    if kind == "json":
        serialized = LLMatcher.grammar_from_json_schema(value, defaults={"whitespace_flexible": True})
    else:
        serialized = grammar_from(kind, value)
    assert not LLMatcher.validate_grammar(serialized, None)  # vLLM validates it without a tokenizer
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, serialized)
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def llguidance(*grammars: dict[str, Any]) -> Grammar:
    return Grammar("llguidance", json.dumps({"grammars": list(grammars)}))


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (Grammar("regex", "[0-9]+"), "12", "x"),
        (Grammar("json_schema", '{"type": "integer"}'), "12", '"x"'),
        (Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}'), "[1,2]", "[1 ,2]"),
        (Grammar("lark", 'start: "a" B\nB: /[0-9]/'), "a1", "ab"),
        (llguidance({"lark_grammar": 'start: "a" | "b"'}), "b", "c"),
        (llguidance({"json_schema": {"type": "integer"}}), "12", "x"),
        (
            llguidance(
                {"lark_grammar": 'start: "@x " (@x | @y)'},
                {"name": "x", "lark_grammar": "start: A\nA: /[0-9]}/"},
                {"name": "y", "json_schema": {"type": "boolean"}},
            ),
            "@x true",
            "@x x",
        ),
        (
            llguidance(
                {"lark_grammar": "start: @x"},
                {"name": "x", "lark_grammar": 'start: "<" @y ">"'},
                {"name": "y", "lark_grammar": 'start: "y"'},
            ),
            "<y>",
            "<x>",
        ),
    ],
    ids=["regex", "schema", "compact JSON", "lark", "one lark", "one schema", "references", "nested references"],
)
def test_converted_grammar_matches_the_same_texts(grammar: Grammar, accepted: str, refused: str) -> None:
    assert matches(grammar, accepted)
    assert not matches(grammar, refused)


def test_special_tokens_are_given_by_id() -> None:
    assert to_structured_outputs(Grammar("lark", 'start: "a" <|im_end|>'), SPECIAL) == {"grammar": 'start: "a" <[2]>'}


@pytest.mark.parametrize(
    "grammar",
    [
        llguidance({"nodes": []}),
        llguidance({"lark_grammar": "start: @missing"}),
        llguidance({"lark_grammar": "start: @x"}, {"name": "x", "lark_grammar": "start: @x"}),
    ],
)
def test_grammar_that_lark_cannot_express_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_structured_outputs(grammar, SPECIAL)
    assert caught.value.code == "invalid_grammar"
