"""Calls in a Markdown code block, in every format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.events import ToolCallDelta
from syringa.output.detokenizer import TextSegment
from syringa.output.tools.base import ToolCallParser
from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import TOOL_CALL_FORMATS, ToolCallFormat
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

FORMATS = [format for format in TOOL_CALL_FORMATS if format != "harmony"]  # whose text has a channel of its own
FUNCTIONS: dict[str, dict[str, Any]] = {"f": {}, "get_weather": {"type": "object"}}
CALL = '{"name": "f", "arguments": {"x": ["```", "}"]}}'
PRETTY = '{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}'
F, WEATHER = ("f", '{"x": ["```", "}"]}'), ("get_weather", '{\n    "city": "Rome"\n  }')


def new(format: ToolCallFormat = "hermes") -> ToolCallParser:
    return create_tool_parser(format, 0, FUNCTIONS)


def block(*lines: str) -> str:
    return "\n".join(("```json", *lines, "```"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (block(CALL), "", [F]),
        (f"\n{block(PRETTY)}\n", "", [WEATHER]),
        (f"Sure:\n\n{block(CALL)}\nThis calls f.", "Sure:\n\n", [F]),
        (f"{block(CALL)}\n\n{block(PRETTY)}", "", [F, WEATHER]),
        (block(CALL, PRETTY), "", [F, WEATHER]),
        (block(f"[{CALL},", f" {PRETTY}]"), "", [F, WEATHER]),
        ('```json {"name":"f","parameters":{}}```', "", [("f", "{}")]),
        (block(CALL, "", '{"x": 1}', "more"), "", [F]),
        # truncated or broken
        (block(CALL)[:-4], "", [F]),
        ('```json\n{"name": "f", "arguments": {"x": "y', "", [("f", '{"x": "y')]),
        ('```json\n{"name": "f", "arguments": {"x": oops}}\n``` So.', "", [("f", '{"x": ')]),
    ],
)
def test_parser_reads_calls_in_a_code_block(format: ToolCallFormat, text: str, answer: str, calls: list[Any]) -> None:
    check_stage(lambda: new(format), text, ("", answer, calls))


ORDINARY = (
    block('{"name": "Bob", "arguments": {}}'),
    block('{"name": "f", "description": "A function."}'),
    block('{"name": "f", "arguments": "none"}'),
    block('{"x": 1, "name": "f", "arguments": {}}'),
    block('{"name": "f"}'),
    block("[1, 2]"),
    "```json\n",
    "```json5\n" + CALL,
    '```json\n{"name": "f", "argu',
    f"```python\n{CALL}\n```",
    f"`{CALL}`",
    CALL[1:],
    "``` json",
    " \n```js",
)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ORDINARY)
def test_parser_returns_other_code_blocks_as_they_are(format: ToolCallFormat, text: str) -> None:
    check_stage(lambda: new(format), text, ("", text, []))
    after = f"See:\n{text}\nand {text}."
    check_stage(lambda: new(format), after, ("", after, []))


def test_parser_without_functions_reads_no_calls_in_code_blocks() -> None:
    check_stage(lambda: create_tool_parser("hermes", 0, {}), block(CALL), ("", block(CALL), []))


def test_parser_reads_a_call_after_another_code_block() -> None:
    before = block('{"name": "Bob"}') + "\nSo: "
    check_stage(new, before + block(CALL), ("", before, [F]))
    own = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    check_stage(new, before + own, ("", before, [("f", "{}")]))


def test_parser_does_not_search_for_code_blocks_within_a_call() -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{block(CALL)}\n</parameter>\n</function>\n</tool_call>"
    schemas = {"f": {"type": "object", "properties": {"x": {"type": "string"}}}}
    _, answer, calls = fold(run_stage(create_tool_parser("qwen-coder", 0, schemas), split_text(text, range(len(text)))))
    assert answer == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"x": block(CALL)})]


def test_parser_streams_the_arguments_of_a_call_in_a_code_block() -> None:
    parser = new()
    assert parser.feed([TextSegment(text) for text in ("``", '`json\n{"name": "get_', 'weather", "arg')]) == []
    assert parser.calls == 0
    seen = [parser.feed([TextSegment(text)]) for text in ('uments": {"ci', 'ty": "Ro', 'me"}}', "\n```")]
    pieces = [[each.arguments for each in out if isinstance(each, ToolCallDelta)] for out in seen]
    assert parser.calls == 1
    assert pieces == [['{"ci'], ['ty": "Ro'], ['me"}'], []]


words = st.sampled_from(
    ["```json", "```", "`", "json", "\n", " ", "{", "}", "[", "{}", ":", ", ", '"name"', '"f"', '"arguments"', '"x": 1']
) | st.sampled_from([CALL, "é", "<tool_call>", "</tool_call>", "Well.", '{"name": "f", ', '"parameters": {"a": "'])


@given(st.lists(words, max_size=10), st.data())
def test_parser_result_is_independent_of_splits(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = fold(run_stage(new(), [TextSegment(text)]))
    pieces = split_text(text, data.draw(split_points(text)))
    assert fold(run_stage(new(), pieces, at_once=data.draw(st.booleans()))) == whole
    _, answer, calls = whole
    if not calls and "<tool_call>" not in text:
        assert answer == text
