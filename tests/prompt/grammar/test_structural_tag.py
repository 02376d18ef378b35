"""Tests of structural tags: the texts that both forms accept, and what is refused with its path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.api.fields.grammars import tag_grammar
from syringa.errors import InvalidRequest
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.output_grammar import ReasoningOptions, build_output_grammar
from tests.prompt.grammar.matching import byte_tokenizer, follows, lark_vocabulary
from tests.tiers import examples

TEXT = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
WORD = {"type": "const_string", "value": "word"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", WORD, "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more}


def separated(**more: Any) -> dict[str, Any]:
    tags = [tag("<", NUMBER, ">"), tag("[", TEXT, "]")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ",", **more}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def formatted(format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


STRUCTURES = [
    {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
    {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
]
OLDER = {"structures": STRUCTURES, "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("value", "accepted", "refused"),
    [
        (OLDER, ["", "hi", "hi <f=a>12</f> you<f=b>true</f>", "<f"], ["<f=a>x</f>", "<f=c>1</f>", "<f=a>1", "x<f="]),
        (formatted(WORD), ["word"], ["", "words"]),
        (formatted(triggered()), ["hi", "hi <f=a>1</f>!<f=b>word</f>"], ["hi <f=a>word</f>"]),
        (formatted(triggered(at_least_one=True)), ["<f=a>1</f> more <f=b>word</f>"], ["", "hi <f=a>1</f>"]),
        (formatted(triggered(stop_after_first=True)), ["hi", "hi <f=a>1</f>"], ["hi <f=a>1</f> more"]),
        (formatted(triggered(at_least_one=True, stop_after_first=True)), ["<f=a>1</f>"], ["", "<f=a>1</f>x"]),
        (formatted(separated()), ["", "<1>", "<1>,[a],<2>"], ["<1><2>", "<1>,"]),
        (formatted(separated(at_least_one=True, stop_after_first=True)), ["<1>", "[a]"], ["", "<1>,<2>"]),
        (formatted(tag("<a>", TEXT, ["</a>", "</b>"])), ["<a>x</a>", "<a></b>"], ["<a>x</c>", "<a>x</a>y"]),
        (formatted(tag("<a>", {"type": "regex", "pattern": "[^/]*>?"}, ">")), ["<a>x>", "<a>x>>"], ["<a>x", "<a>/>"]),
        (formatted(tag("<a>", triggered(), "</a>")), ["<a>hi <f=a>1</f> x</a>"], ["<a>hi <f=a>1</f>", "<a><f=c></a>"]),
        (formatted(sequence(TEXT, {"type": "const_string", "value": "!"}, NUMBER)), ["hi!1", "!2"], ["hi", "hi!x"]),
        (formatted(sequence(tag("(", TEXT, ")"), triggered(at_least_one=True))), ["(x)<f=a>1</f>"], ["(x)y"]),
        (formatted(sequence(tag("(", WORD, ""), {"type": "const_string", "value": ")"})), ["(word)"], ["(word"]),
        (formatted({"type": "or", "elements": [NUMBER, WORD]}), ["1", "word"], ["1word"]),
        (formatted({"type": "optional", "content": NUMBER}), ["", "1"], ["x"]),
        (formatted({"type": "star", "content": WORD}), ["", "wordword"], ["wordwor"]),
        (formatted({"type": "plus", "content": WORD}), ["word"], [""]),
        (formatted({"type": "repeat", "min": 1, "max": 2, "content": WORD}), ["word"], ["", "word" * 3]),
        (formatted({"type": "repeat", "min": 2, "max": -1, "content": WORD}), ["word" * 5], ["word"]),
        (formatted(tag("<", {"type": "grammar", "grammar": 'root ::= "x" root?'}, ">")), ["<xx>"], ["<>"]),
        (formatted(tag("<", {"type": "grammar", "grammar": 'start: "x"+'}, ">")), ["<xx>"], ["<>"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_structural_tag_accepts_texts_of_its_format(value: Any, accepted: list[str], refused: list[str]) -> None:
    grammar = tag_grammar(value, "tag", LarkVocabulary(), ignored=[])
    for text in accepted:
        assert follows(grammar, text), text
    for text in refused:
        assert not follows(grammar, text), text


@pytest.mark.parametrize("trigger", ["<call>", "<ca"])
def test_structural_tag_is_begun_and_ended_by_special_tokens(trigger: str) -> None:
    """Also where the trigger is the beginning of a special token's text, which is one token to the model."""
    tokenizer = byte_tokenizer("<call>", "</call>")
    structure = {"begin": "<call>", "schema": {"type": "integer"}, "end": "</call>"}
    value = {"structures": [structure], "triggers": [trigger]}
    grammar = tag_grammar(value, "tag", lark_vocabulary(tokenizer), ignored=[])
    assert follows(grammar, "hi <call>1</call> you", tokenizer)
    assert not follows(grammar, "hi <call>x</call>", tokenizer)


@pytest.mark.parametrize("value", [OLDER, formatted(tag("<", {"type": "grammar", "grammar": 'start: "x"'}, ">"))])
def test_structural_tag_follows_free_reasoning(value: Any) -> None:
    tokenizer = byte_tokenizer("<think>", "</think>")
    vocabulary = lark_vocabulary(tokenizer)
    whole = build_output_grammar(
        vocabulary,
        reasoning=ReasoningOptions(format="think"),
        constraint=tag_grammar(value, "tag", vocabulary, ignored=[]),
    )
    assert whole is not None
    answer = "<x>" if "format" in value else "<f=a>1</f>"
    assert follows(whole, f"<think>free <f=c> text</think>\n\n{answer}", tokenizer)
    assert not follows(whole, "<think>free text</think>\n\n<f=a>x</f>", tokenizer)


@pytest.mark.parametrize(
    ("value", "param", "message"),
    [
        ({}, "tag", "expected format, or structures with triggers"),
        ({"structures": STRUCTURES}, "tag", "expected format, or structures with triggers"),
        ({**OLDER, "triggers": ["<g"]}, "tag.structures[0].begin", "starts with none of the triggers"),
        ({**OLDER, "triggers": [""]}, "tag.triggers[0]", "length >= 1"),
        ({**OLDER, "structures": []}, "tag.structures", "length >= 1"),
        ({**OLDER, "format": WORD}, "tag.structures", "cannot be combined with format"),
        (
            {**OLDER, "structures": [{"begin": "<f=", "schema": {"$ref": "#"}, "end": ""}]},
            "tag.structures[0].schema",
            "refers to itself",
        ),
        (formatted({"type": "token", "token": 5}), "tag.format.type", "'token'. Supported formats: const_string, json"),
        (formatted(sequence(WORD, {"type": "dispatch"})), "tag.format.elements[1].type", "invalid value 'dispatch'"),
        (formatted({**NUMBER, "style": "qwen_xml"}), "tag.format.style", "qwen_xml"),
        (formatted({**TEXT, "max_tokens": 5}), "tag.format", "unknown field max_tokens"),
        (formatted({**TEXT, "excludes": ["x"]}), "tag.format.excludes", "length <= 0"),
        (formatted(sequence(TEXT, NUMBER)), "tag.format.elements[0]", "free text has to end"),
        (formatted({"type": "star", "content": TEXT}), "tag.format.content", "free text has to end"),
        (formatted({"type": "repeat", "min": 2, "max": 1, "content": WORD}), "tag.format.max", "expected at least min"),
        (formatted({"type": "grammar", "grammar": "root ::= x"}), "tag.format.grammar", "the rule x is not defined"),
        ({**OLDER, "structures": STRUCTURES * 65}, "tag.structures[128]", "at most 128 parts"),
        ({**OLDER, "triggers": ["<f="] * 65}, "tag.triggers", "length <= 64"),
        (formatted({**WORD, "value": "x" * 1_000_001}), "tag", "at most 1000000 characters"),
        ("not json", "tag", "expected a JSON object, or its text"),
        ("", "tag", "expected a JSON object, or its text"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_structural_tag_that_is_invalid_is_refused_with_its_path(value: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tag_grammar(value, "tag", LarkVocabulary(), ignored=[])
    assert raised.value.param == param
    assert message in raised.value.message


def test_deeply_nested_structural_tag_is_refused() -> None:
    nested: dict[str, Any] = WORD
    for _ in range(600):
        nested = sequence(nested)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        tag_grammar(formatted(nested), "tag", LarkVocabulary(), ignored=[])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(["<f=", "a>", "b>", "1", "true", "</f>", "<", "x", " "]), max_size=7).map("".join))
def test_structural_tag_constrains_what_follows_a_trigger_and_nothing_else(text: str) -> None:
    outside = re.sub(r"<f=(a>(0|-?[1-9][0-9]*)|b>(true|false))</f>", "\n", text)
    assert follows(tag_grammar(OLDER, "tag", LarkVocabulary(), ignored=[]), text) == ("<f=" not in outside)
