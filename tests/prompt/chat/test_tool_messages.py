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


def test_tool_calls_as_text_keeps_text_before_calls() -> None:
    message = {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL], "reasoning_content": "hm"}
    assert tool_calls_as_text([message]) == [
        {"role": "assistant", "content": f"Well.\n{WRITTEN}\n{WRITTEN}", "reasoning_content": "hm"}
    ]
    assert tool_calls_as_text([{**message, "content": None}])[0]["content"] == f"{WRITTEN}\n{WRITTEN}"


def test_tool_calls_as_text_merges_results_with_the_next_user_message() -> None:
    result = {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"}
    description = "<tool_response>\n1\n</tool_response>"
    image = [{"type": "image"}]
    assert tool_calls_as_text([result, result, user("So?"), user("Well?")]) == [
        user(f"{description}\n{description}\nSo?"),
        user("Well?"),
    ]
    assert tool_calls_as_text([result, user(image)]) == [user([{"type": "text", "text": description + "\n"}, *image])]
    assert tool_calls_as_text([user("a"), user("b")]) == [user("a"), user("b")]


def test_tool_instructions_go_into_the_first_system_or_user_message() -> None:
    description = tools_preamble(USE)
    system = {"role": "system", "content": "Be kind."}
    messages = [{"role": "assistant", "content": "Hello."}, user("hi")]
    instructed = add_tool_instructions([system, *messages], USE, supports_system=True)
    examples = instructed[1:-2]
    assert (instructed[0]["content"], instructed[-2:]) == (description + "Be kind.", messages)
    assert add_tool_instructions(messages, USE, supports_system=True) == [
        {"role": "system", "content": description.rstrip()},
        *examples,
        *messages,
    ]
    first = {**examples[0], "content": description + examples[0]["content"]}
    assert add_tool_instructions(messages, USE, supports_system=False) == [first, *examples[1:], *messages]


def test_tool_examples_alternate_roles_and_end_with_a_call_to_an_actual_tool() -> None:
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
def test_tool_example_contains_the_required_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    tool = Tool(name="f", parameters=schema)
    use = ToolUse(tools=[tool], mode="auto", callable=frozenset({"f"}))
    call = add_tool_instructions([user("hi")], use, supports_system=True)[-2]["content"]
    assert json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] == arguments


def test_short_preamble_has_signatures_and_first_sentences() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}},
            "at": {"type": "object", "properties": {"hour": {"type": ["integer", "null"]}}, "required": ["hour"]},
            "other": {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
            "odd": True,
        },
        "required": ["city"],
    }
    tools = [
        Tool(name="weather", description="Return the weather. It may rain.\nOr not.", parameters=parameters),
        Tool(name="now"),
    ]
    preamble = tools_preamble(ToolUse(tools=tools, mode="auto", callable=frozenset({"weather", "now"})), short=True)
    assert preamble.splitlines()[1:5] == [
        "<tools>",
        'weather(city: string, unit?: "C" | "F", days?: integer[], at?: {hour: integer | null}, '
        "other?: string | any, odd?: any): Return the weather",
        "now()",
        "</tools>",
    ]
