from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.prompt.chat.tool_messages import add_tool_instructions, tool_calls_as_text
from syringa.prompt.chat.tools import Tool, ToolUse, tools_preamble

USE = ToolUse(tools=[Tool(name="f")], mode="auto", callable=frozenset({"f"}))
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}}
WRITTEN = '<tool_call>{"name": "f", "arguments": {"x": "ü"}}</tool_call>'


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_text_stands_before_the_calls_of_a_message() -> None:
    message = {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL], "reasoning_content": "hm"}
    assert tool_calls_as_text([message]) == [
        {"role": "assistant", "content": f"Well.\n{WRITTEN}\n{WRITTEN}", "reasoning_content": "hm"}
    ]
    assert tool_calls_as_text([{**message, "content": None}])[0]["content"] == f"{WRITTEN}\n{WRITTEN}"


def test_results_and_what_is_said_after_them_are_one_message() -> None:
    result = {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"}
    told = "<tool_response>\n1\n</tool_response>"
    image = [{"type": "image"}]
    assert tool_calls_as_text([result, result, user("So?"), user("Well?")]) == [
        user(f"{told}\n{told}\nSo?"),
        user("Well?"),
    ]
    assert tool_calls_as_text([result, user(image)]) == [user([{"type": "text", "text": told + "\n"}, *image])]
    assert tool_calls_as_text([user("a"), user("b")]) == [user("a"), user("b")]


def test_where_the_tools_stand() -> None:
    told = tools_preamble(USE)
    system = {"role": "system", "content": "Be kind."}
    said = [{"role": "assistant", "content": "Hello."}, user("hi")]
    told_of = add_tool_instructions([system, *said], USE, supports_system=True)
    examples = told_of[1:-2]
    assert (told_of[0]["content"], told_of[-2:]) == (told + "Be kind.", said)
    assert add_tool_instructions(said, USE, supports_system=True) == [
        {"role": "system", "content": told.rstrip()},
        *examples,
        *said,
    ]
    first = {**examples[0], "content": told + examples[0]["content"]}
    assert add_tool_instructions(said, USE, supports_system=False) == [first, *examples[1:], *said]


def test_examples_take_turns_and_end_with_a_call_of_what_there_is() -> None:
    examples = add_tool_instructions([user("hi")], USE, supports_system=True)[1:-1]
    assert [each["role"] for each in examples] == ["user", "assistant"] * (len(examples) // 2)
    call = examples[-1]["content"].removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(call)["name"] == USE.tools[0].name


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({}, {}),
        ({"properties": {"a": {"type": "string"}}}, {}),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}, {"a": "example"}),
        (
            {"properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}}, "required": ["a", "b"]},
            {"a": "x", "b": 1},
        ),
        ({"properties": {"a": True}, "required": ["a", 7, "c"]}, {"a": "example", "c": "example"}),
        ({"properties": 3, "required": "a"}, {}),
    ],
)
def test_a_sample_call_has_what_is_needed(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    tool = Tool(name="f", parameters=schema)
    use = ToolUse(tools=[tool], mode="auto", callable=frozenset({"f"}))
    call = add_tool_instructions([user("hi")], use, supports_system=True)[-2]["content"]
    assert json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] == arguments
