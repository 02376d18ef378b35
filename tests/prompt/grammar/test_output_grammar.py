"""Reasoning, constraints and tool calls in one grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.output_formats import ReasoningFormat
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.output_grammar import ReasoningOptions, build_output_grammar
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar
from tests.prompt.grammar.matching import byte_tokenizer, follows

INTEGER: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA = Grammar("json_schema", json.dumps({**INTEGER, "additionalProperties": False}))
REGEX = Grammar("regex", "yes/no|never")
LARK = Grammar("lark", 'start: "x" thing\nthing: /[0-9]+/')
GRAMMARS = [{"lark_grammar": 'start: "u" @v'}, {"name": "v", "lark_grammar": 'start: "w"'}]
LLG = Grammar("llguidance", json.dumps({"grammars": GRAMMARS}))
TOOL = Tool(name="f", schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'


def fits(text: str, *special: str, **request: Any) -> bool:
    """Return whether the grammar accepts the text, with the given special tokens."""
    tokenizer = byte_tokenizer(*special)
    found = {each: tokenizer.token_to_id(each) for each in ("<eos>", *special)}
    grammar = build_output_grammar(LarkVocabulary(found), **request)
    assert grammar is not None
    validate_grammar(grammar)
    return follows(grammar, text, tokenizer)


def tools(mode: Any = "auto", **more: Any) -> ToolUse:
    return ToolUse(tools=[TOOL], mode=mode, callable=frozenset({"f"}), **more)


@pytest.mark.parametrize("special", [("<think>", "</think>"), ()], ids=["tokens", "spelled"])
@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [(SCHEMA, '{"a":1}', '{"b":1}'), (REGEX, "yes/no", "no"), (LARK, "x12", "x"), (LLG, "uw", "u")],
    ids=["schema", "regex", "lark", "llguidance"],
)
def test_reasoning_is_free_and_answer_is_constrained(
    special: tuple[str, ...], constraint: Grammar, good: str, bad: str
) -> None:
    reasoning = ReasoningOptions(format="think")
    for reasoning_text in ("", "<think>\nAny <b> {text\n</think>\n\n", "<think></think>"):
        assert fits(reasoning_text + good, *special, reasoning=reasoning, constraint=constraint)
        assert not fits(reasoning_text + bad, *special, reasoning=reasoning, constraint=constraint)
    assert not fits("<think>" + good, *special, reasoning=reasoning, constraint=constraint)
    opened = ReasoningOptions(format="think", opened=True)
    assert fits("Any text.</think>" + good, *special, reasoning=opened, constraint=constraint)
    assert not fits(good, *special, reasoning=opened, constraint=constraint)
    off = ReasoningOptions(format="think", allowed=False)
    assert fits(good, *special, reasoning=off, constraint=constraint)
    assert not fits("<think></think>" + good, *special, reasoning=off, constraint=constraint)


def test_reasoning_budget_closes_the_section() -> None:
    special = ("<think>", "</think>")
    for budget in (0, 1, 5):
        reasoning = ReasoningOptions(format="think", budget=budget)
        assert fits("<think>" + "x" * budget + "</think>answer", *special, reasoning=reasoning)
        assert not fits("<think>" + "x" * (budget + 1) + "</think>answer", *special, reasoning=reasoning)
        opened = ReasoningOptions(format="think", budget=budget, opened=True)
        assert fits("x" * budget + "</think>answer", *special, reasoning=opened)
        assert not fits("x" * (budget + 1) + "</think>answer", *special, reasoning=opened)
    assert fits("no reasoning_text", *special, reasoning=ReasoningOptions(format="think", budget=3))
    assert fits(
        "<think>abc</think>" + '{"a":1}',
        *special,
        reasoning=ReasoningOptions(format="think", budget=3),
        constraint=SCHEMA,
    )


def test_reasoning_budget_requires_a_special_end_token() -> None:
    with pytest.raises(InvalidRequest, match="not a special token") as error:
        build_output_grammar(LarkVocabulary(), reasoning=ReasoningOptions(format="think", budget=3))
    assert error.value.param == "thinking_token_budget"


@pytest.mark.parametrize("special", [("<think>", "</think>"), ()], ids=["tokens", "spelled"])
def test_grammar_forbids_reasoning_that_the_template_cannot(special: tuple[str, ...]) -> None:
    off = ReasoningOptions(format="think", allowed=False, forbid_marker=True)
    assert fits("Four.", *special, reasoning=off)
    assert not fits("<think>Hm.</think>Four.", *special, reasoning=off)
    opened = ReasoningOptions(format="think", allowed=False, opened=True, budget=0)
    assert fits("</think>Four.", *special, reasoning=opened)
    assert not fits("Hm.</think>Four.", *special, reasoning=opened)


def test_no_constraint_gives_no_grammar() -> None:
    assert build_output_grammar(LarkVocabulary()) is None
    assert build_output_grammar(LarkVocabulary(), reasoning=ReasoningOptions(format="think")) is None
    assert build_output_grammar(LarkVocabulary(), constraint=SCHEMA) is SCHEMA


@pytest.mark.parametrize(
    "special", [("<think>", "</think>", "<tool_call>", "</tool_call>"), ()], ids=["tokens", "spelled"]
)
def test_tool_calls_after_reasoning(special: tuple[str, ...]) -> None:
    reasoning = ReasoningOptions(format="think")
    reasoning_text = "<think>Shall I write a <b>?</think>\n"
    for mode, text, good in [
        ("auto", reasoning_text + "Well. " + CALL, True),
        ("auto", reasoning_text + "Well.", True),
        ("auto", "Well.", True),
        ("auto", reasoning_text + CALL.replace('"f"', '"g"'), False),
        ("required", reasoning_text + CALL, True),
        ("required", CALL, True),
        ("required", reasoning_text + "Well. " + CALL, False),
        ("required", reasoning_text, False),
        ("required", reasoning_text + CALL.replace("1", '"1"'), False),
    ]:
        assert fits(text, *special, reasoning=reasoning, tools=tools(mode)) is good, (mode, text)


def test_tool_calls_or_constrained_answer() -> None:
    for text, good in [(CALL, True), ('{"a":1}', True), ("text", False), ('{"b":1}', False), ("{}" + CALL, False)]:
        assert fits(text, tools=tools(), constraint=SCHEMA) is good, text
    assert fits(CALL, tools=tools("required"), constraint=SCHEMA)
    assert not fits('{"a":1}', tools=tools("required"), constraint=SCHEMA)


@pytest.mark.parametrize(
    ("format", "begin", "end", "special"),
    [
        ("mistral", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
        ("kimi-vl", "◁think▷", "◁/think▷", ()),
        ("gemma", "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    ],
)
def test_other_reasoning_markers(format: ReasoningFormat, begin: str, end: str, special: tuple[str, ...]) -> None:
    reasoning = ReasoningOptions(format=format)
    assert fits(f'{begin}hm{end}{{"a":1}}', *special, reasoning=reasoning, constraint=SCHEMA)
    assert not fits(f"{begin}hm{end}hm", *special, reasoning=reasoning, constraint=SCHEMA)


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
COMMENT = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def test_harmony_grammar() -> None:
    reasoning = ReasoningOptions(format="harmony")
    for reasoning_text in ("", ANALYSIS):
        assert fits(reasoning_text + FINAL + '{"a":1}', *HARMONY, reasoning=reasoning, constraint=SCHEMA)
        assert not fits(reasoning_text + '{"a":1}', *HARMONY, reasoning=reasoning, constraint=SCHEMA)
        for mode, text, good in [
            ("auto", FINAL + "Hello.", True),
            ("auto", COMMENT + TO_F + '{"n": 1}', True),
            ("auto", TO_F.replace(".f", ".g") + "{}", False),
            ("required", TO_F + '{"n": 1}', True),
            ("required", FINAL + "Hello.", False),
            ("required", TO_F + "{}", False),
        ]:
            wrote = fits(
                reasoning_text + text, *HARMONY, reasoning=reasoning, tools=tools(mode), tool_call_format="harmony"
            )
            assert wrote is good, (mode, text)
    off = ReasoningOptions(format="harmony", allowed=False)
    assert fits(FINAL + "Hello.", *HARMONY, reasoning=off)
    assert not fits(ANALYSIS + FINAL + "Hello.", *HARMONY, reasoning=off)
    assert fits(ANALYSIS + FINAL + "Hello.", *HARMONY, reasoning=ReasoningOptions(format="harmony", budget=3))
    assert not fits(ANALYSIS + FINAL + "Hello.", *HARMONY, reasoning=ReasoningOptions(format="harmony", budget=2))
