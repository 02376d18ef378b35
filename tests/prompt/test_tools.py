from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, pre_tokenizers

from syringa.grammar import lower
from syringa.prompt.grammar import validate
from syringa.prompt.tools import Tool, ToolUse, call_grammar, closed, describe, preamble, special_marks
from syringa.types import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "$defs": {"city": {"type": "string", "maxLength": 12}},
}
WEATHER = Tool(name="weather", description="Tells it.", parameters=SCHEMA, schema=closed(SCHEMA))
TIME = Tool(name="time")
GOOD = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>'
LOOSE = '<tool_call>{"name": "weather", "arguments": {"town": 1}}</tool_call>'
NOW = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def use(mode: Any = "required", *tools: Tool, names: str = "weather time", parallel: bool = True) -> ToolUse:
    return ToolUse(tools=tools or [WEATHER, TIME], mode=mode, callable=frozenset(names.split()), parallel=parallel)


def byte_tokenizer(*special: str, plain: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """One token a byte, and what is named."""
    vocab = {character: id_ for id_, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in ("<eos>", *special)])
    tokenizer.add_tokens([tokenizers.AddedToken(each, special=False) for each in plain])
    return tokenizer


def follows(grammar: Grammar, text: str, tokenizer: tokenizers.Tokenizer | None = None) -> bool:
    """Whether a text can be written under the grammar, and end there."""
    tokenizer = tokenizer or byte_tokenizer()
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<eos>")), lower(grammar), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (GOOD, True),
        (NOW, True),
        (GOOD + NOW, True),
        (NOW * 8, True),
        (NOW * 9, False),
        (f"{GOOD}\n{NOW}", False),
        (LOOSE, False),
        (GOOD.replace("3", "12"), False),
        (GOOD.replace("Paris", "Paris and London"), False),
        (GOOD.replace('"days"', '"months"'), False),
        (GOOD.replace("weather", "whether"), False),
        (f"Well, {GOOD}", False),
        (f"{GOOD} Done.", False),
        ("", False),
        ("hello", False),
        (GOOD[:-1], False),
    ],
)
def test_required(text: str, fits: bool) -> None:
    assert follows(call_grammar(use()), text) == fits


@pytest.mark.parametrize(
    ("text", "loosely", "strictly"),
    [
        ("", True, True),
        ("hello <tool", True, True),
        (GOOD, True, True),
        (f"Well.\n{GOOD}\n{NOW} Done.", True, True),
        (LOOSE, True, False),
        ("<tool_call>", False, False),
        ("a <tool_call>nothing", False, False),
        (NOW.replace("time", "thyme"), False, False),
        (f"{NOW}<tool_call>", False, False),
    ],
)
def test_auto_is_free_until_a_call_begins(text: str, loosely: bool, strictly: bool) -> None:
    strict = Tool(name="weather", parameters=SCHEMA, schema=closed(SCHEMA), strict=True)
    assert follows(call_grammar(use("auto")), text) == loosely
    assert follows(call_grammar(use("auto", strict, TIME)), text) == strictly


def test_one_tool_and_one_call() -> None:
    grammar = call_grammar(use(names="time", parallel=False))
    assert follows(grammar, NOW)
    assert not follows(grammar, GOOD)
    assert not follows(grammar, NOW + NOW)
    auto = call_grammar(use("auto", parallel=False))
    assert follows(auto, f"Well. {NOW}")
    assert follows(auto, "Well.")
    assert not follows(auto, f"{NOW}\n{NOW}")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_marks_that_are_tokens(mode: str) -> None:
    for tokenizer in (
        byte_tokenizer("<tool_call>", "</tool_call>"),
        byte_tokenizer("<tool_call>"),
        byte_tokenizer(plain=("<tool_call>", "</tool_call>")),
    ):
        marks = special_marks(_Vocabulary(tokenizer))
        grammar = call_grammar(use(mode), marks)
        assert follows(grammar, f"{GOOD}\n{NOW}", tokenizer)
        assert not follows(grammar, f"{GOOD}\n{NOW[:-3]}", tokenizer)
    assert special_marks(_Vocabulary(byte_tokenizer("<tool_call>"))) == {"<tool_call>"}


class _Vocabulary:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.added_tokens = frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values())


def test_names_and_schemas_cannot_break_out_of_the_grammar() -> None:
    odd = {"type": "object", "properties": {'"\n}| /x/ %json': {"const": '</tool_call>"\n\\'}}, "required": []}
    grammar = call_grammar(use("required", Tool(name="f-1_", parameters=odd, schema=closed(odd)), names="f-1_"))
    validate(grammar)
    arguments = json.dumps({'"\n}| /x/ %json': '</tool_call>"\n\\'})
    assert follows(grammar, f'<tool_call>{{"name": "f-1_", "arguments": {arguments}}}</tool_call>')


def test_closed() -> None:
    inner = {"type": "object", "properties": {"x": {}}}
    assert closed(inner) == {**inner, "additionalProperties": False}
    assert closed({"type": "object"}) == {"type": "object"}
    assert closed({**inner, "additionalProperties": True})["additionalProperties"] is True
    assert closed({**inner, "allOf": [inner]}) == {**inner, "allOf": [inner]}
    assert closed({**inner, "required": ["y"]}) == {**inner, "required": ["y"]}
    nested = closed({"properties": {"a": {"type": "array", "items": inner}}})
    assert nested["properties"]["a"]["items"]["additionalProperties"] is False


def test_the_preamble_names_what_there_is_and_depends_on_the_tools_alone() -> None:
    text = preamble(use())
    for tool in (WEATHER, TIME):
        assert json.dumps(describe(tool)) in text
    assert "<tool_call>" in text
    assert text.endswith("\n\n")
    assert preamble(use("auto", names="time")) == text
    assert describe(TIME)["function"]["parameters"]["type"] == "object"
