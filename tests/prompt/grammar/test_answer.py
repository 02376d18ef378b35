"""Thoughts and constraints in one grammar: what may be written, and what may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.output_formats import ThoughtFormat
from syringa.prompt.chat.tools import Tool, ToolUse
from syringa.prompt.grammar.answer import Thinking, answer_grammar
from syringa.prompt.grammar.lark import Spelling
from syringa.prompt.grammar.validation import validate
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
    """With the marks as special tokens, or spelt out where none are named."""
    tokenizer = byte_tokenizer(*special)
    found = {each: tokenizer.token_to_id(each) for each in ("<eos>", *special)}
    grammar = answer_grammar(Spelling(found), **request)
    assert grammar is not None
    validate(grammar)
    return follows(grammar, text, tokenizer)


def tools(mode: Any = "auto", **more: Any) -> ToolUse:
    return ToolUse(tools=[TOOL], mode=mode, callable=frozenset({"f"}), **more)


@pytest.mark.parametrize("special", [("<think>", "</think>"), ()], ids=["tokens", "spelt"])
@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [(SCHEMA, '{"a":1}', '{"b":1}'), (REGEX, "yes/no", "no"), (LARK, "x12", "x"), (LLG, "uw", "u")],
    ids=["schema", "regex", "lark", "llguidance"],
)
def test_the_thought_is_free_and_the_answer_is_held(
    special: tuple[str, ...], constraint: Grammar, good: str, bad: str
) -> None:
    thinking = Thinking(format="think")
    for thought in ("", "<think>\nAny <b> {text\n</think>\n\n", "<think></think>"):
        assert fits(thought + good, *special, thinking=thinking, constraint=constraint)
        assert not fits(thought + bad, *special, thinking=thinking, constraint=constraint)
    assert not fits("<think>" + good, *special, thinking=thinking, constraint=constraint)
    opened = Thinking(format="think", opened=True)
    assert fits("Any text.</think>" + good, *special, thinking=opened, constraint=constraint)
    assert not fits(good, *special, thinking=opened, constraint=constraint)
    off = Thinking(format="think", allowed=False)
    assert fits(good, *special, thinking=off, constraint=constraint)
    assert not fits("<think></think>" + good, *special, thinking=off, constraint=constraint)


def test_a_budget_closes_the_thought() -> None:
    special = ("<think>", "</think>")
    for budget in (0, 1, 5):
        thinking = Thinking(format="think", budget=budget)
        assert fits("<think>" + "x" * budget + "</think>answer", *special, thinking=thinking)
        assert not fits("<think>" + "x" * (budget + 1) + "</think>answer", *special, thinking=thinking)
        opened = Thinking(format="think", budget=budget, opened=True)
        assert fits("x" * budget + "</think>answer", *special, thinking=opened)
        assert not fits("x" * (budget + 1) + "</think>answer", *special, thinking=opened)
    assert fits("no thought", *special, thinking=Thinking(format="think", budget=3))
    assert fits(
        "<think>abc</think>" + '{"a":1}', *special, thinking=Thinking(format="think", budget=3), constraint=SCHEMA
    )


def test_a_budget_needs_a_token_for_the_end() -> None:
    with pytest.raises(InvalidRequest, match="no token of its own") as error:
        answer_grammar(Spelling(), thinking=Thinking(format="think", budget=3))
    assert error.value.param == "thinking_token_budget"


@pytest.mark.parametrize("special", [("<think>", "</think>"), ()], ids=["tokens", "spelt"])
def test_a_thought_that_the_template_cannot_forbid(special: tuple[str, ...]) -> None:
    off = Thinking(format="think", allowed=False, forbidden=True)
    assert fits("Four.", *special, thinking=off)
    assert not fits("<think>Hm.</think>Four.", *special, thinking=off)
    opened = Thinking(format="think", allowed=False, opened=True, budget=0)
    assert fits("</think>Four.", *special, thinking=opened)
    assert not fits("Hm.</think>Four.", *special, thinking=opened)


def test_nothing_to_hold_is_no_grammar() -> None:
    assert answer_grammar(Spelling()) is None
    assert answer_grammar(Spelling(), thinking=Thinking(format="think")) is None
    assert answer_grammar(Spelling(), constraint=SCHEMA) is SCHEMA


@pytest.mark.parametrize(
    "special", [("<think>", "</think>", "<tool_call>", "</tool_call>"), ()], ids=["tokens", "spelt"]
)
def test_calls_behind_a_thought(special: tuple[str, ...]) -> None:
    thinking = Thinking(format="think")
    thought = "<think>Shall I write a <b>?</think>\n"
    for mode, text, good in [
        ("auto", thought + "Well. " + CALL, True),
        ("auto", thought + "Well.", True),
        ("auto", "Well.", True),
        ("auto", thought + CALL.replace('"f"', '"g"'), False),
        ("required", thought + CALL, True),
        ("required", CALL, True),
        ("required", thought + "Well. " + CALL, False),
        ("required", thought, False),
        ("required", thought + CALL.replace("1", '"1"'), False),
    ]:
        assert fits(text, *special, thinking=thinking, tools=tools(mode)) is good, (mode, text)


def test_calls_or_a_constrained_answer() -> None:
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
def test_other_marks(format: ThoughtFormat, begin: str, end: str, special: tuple[str, ...]) -> None:
    thinking = Thinking(format=format)
    assert fits(f'{begin}hm{end}{{"a":1}}', *special, thinking=thinking, constraint=SCHEMA)
    assert not fits(f"{begin}hm{end}hm", *special, thinking=thinking, constraint=SCHEMA)


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
COMMENT = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def test_harmony() -> None:
    thinking = Thinking(format="harmony")
    for thought in ("", ANALYSIS):
        assert fits(thought + FINAL + '{"a":1}', *HARMONY, thinking=thinking, constraint=SCHEMA)
        assert not fits(thought + '{"a":1}', *HARMONY, thinking=thinking, constraint=SCHEMA)
        for mode, text, good in [
            ("auto", FINAL + "Hello.", True),
            ("auto", COMMENT + TO_F + '{"n": 1}', True),
            ("auto", TO_F.replace(".f", ".g") + "{}", False),
            ("required", TO_F + '{"n": 1}', True),
            ("required", FINAL + "Hello.", False),
            ("required", TO_F + "{}", False),
        ]:
            wrote = fits(thought + text, *HARMONY, thinking=thinking, tools=tools(mode), format="harmony")
            assert wrote is good, (mode, text)
    off = Thinking(format="harmony", allowed=False)
    assert fits(FINAL + "Hello.", *HARMONY, thinking=off)
    assert not fits(ANALYSIS + FINAL + "Hello.", *HARMONY, thinking=off)
    assert fits(ANALYSIS + FINAL + "Hello.", *HARMONY, thinking=Thinking(format="harmony", budget=3))
    assert not fits(ANALYSIS + FINAL + "Hello.", *HARMONY, thinking=Thinking(format="harmony", budget=2))
