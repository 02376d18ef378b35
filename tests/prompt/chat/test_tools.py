from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.prompt.chat.tools import Tool, close_schema, tool_definition, tools_preamble
from tests.prompt.grammar.matching import (
    STRICT,
    TIME,
    WEATHER,
    byte_tokenizer,
    call_grammar,
    follows,
    lark_vocabulary,
    use,
)

GOOD = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>'
LOOSE = '<tool_call>{"name": "weather", "arguments": {"town": 1}}</tool_call>'
NOW = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


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
def test_required_mode_allows_only_valid_calls(text: str, fits: bool) -> None:
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
def test_auto_mode_allows_free_text_until_a_call_begins(text: str, loosely: bool, strictly: bool) -> None:
    assert follows(call_grammar(use("auto")), text) == loosely
    assert follows(call_grammar(use("auto", STRICT, TIME)), text) == strictly


def test_single_tool_and_single_call_are_enforced() -> None:
    grammar = call_grammar(use(names="time", parallel=False))
    assert follows(grammar, NOW)
    assert not follows(grammar, GOOD)
    assert not follows(grammar, NOW + NOW)
    auto = call_grammar(use("auto", parallel=False))
    assert follows(auto, f"Well. {NOW}")
    assert follows(auto, "Well.")
    assert not follows(auto, f"{NOW}\n{NOW}")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_markers_may_be_special_tokens(mode: str) -> None:
    for tokenizer in (
        byte_tokenizer("<tool_call>", "</tool_call>"),
        byte_tokenizer("<tool_call>"),
        byte_tokenizer(plain=("<tool_call>", "</tool_call>")),
    ):
        grammar = call_grammar(use(mode), "plain", tokenizer)
        assert follows(grammar, f"{GOOD}\n{NOW}", tokenizer)
        assert not follows(grammar, f"{GOOD}\n{NOW[:-3]}", tokenizer)
    assert lark_vocabulary(byte_tokenizer("<tool_call>")).is_special("<tool_call>")


def test_names_and_schemas_cannot_escape_the_grammar() -> None:
    odd = {"type": "object", "properties": {'"\n}| /x/ %json': {"const": '</tool_call>"\n\\'}}, "required": []}
    grammar = call_grammar(use("required", Tool(name="f-1_", parameters=odd, schema=close_schema(odd)), names="f-1_"))
    arguments = json.dumps({'"\n}| /x/ %json': '</tool_call>"\n\\'})
    assert follows(grammar, f'<tool_call>{{"name": "f-1_", "arguments": {arguments}}}</tool_call>')


def test_close_schema_closes_subschemas() -> None:
    inner: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    shut = {**inner, "additionalProperties": False}
    ref = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": inner}}
    assert close_schema(ref)["$defs"] == {"a": shut}
    assert close_schema({"anyOf": [inner, {"type": "null"}]}) == {"anyOf": [shut, {"type": "null"}]}
    # Subschemas that apply together stay open.
    for joined in ({"oneOf": [inner, inner]}, {"allOf": [inner, inner]}, {"anyOf": [inner], "properties": {}}):
        assert close_schema(joined) == joined
    both = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": inner, "b": inner}}
    assert close_schema(both) == both


def test_close_schema_forbids_undeclared_properties() -> None:
    inner = {"type": "object", "properties": {"x": {}}}
    assert close_schema(inner) == {**inner, "additionalProperties": False}
    assert close_schema({"type": "object"}) == {"type": "object"}
    assert close_schema({**inner, "additionalProperties": True})["additionalProperties"] is True
    assert close_schema({**inner, "allOf": [inner]}) == {**inner, "allOf": [inner]}
    assert close_schema({**inner, "required": ["y"]}) == {**inner, "required": ["y"]}
    nested = close_schema({"properties": {"a": {"type": "array", "items": inner}}})
    assert nested["properties"]["a"]["items"]["additionalProperties"] is False


def test_tools_preamble_lists_all_tools_regardless_of_mode() -> None:
    text = tools_preamble(use())
    for tool in (WEATHER, TIME):
        assert json.dumps(tool_definition(tool)["function"]) in text
    assert "<tool_call>" in text
    assert text.endswith("\n\n")
    assert tools_preamble(use("auto", names="time")) == text
    assert tool_definition(TIME)["function"]["parameters"]["type"] == "object"
