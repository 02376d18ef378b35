from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.output.tools.base import ToolCallParser
from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

MARKERS = ("<|python_tag|>",)
FUNCTIONS = {"get_weather": {}, "f": {}}
PARIS = '{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}'
TOKYO = '{"type": "function", "name": "get_weather", "parameters": {"city": "東京 \\"都\\"", "at": {"lat": 35.7}}}'
PARIS_CALL = ("get_weather", '{"city": "Paris", "unit": "celsius"}')
TOKYO_CALL = ("get_weather", '{"city": "東京 \\"都\\"", "at": {"lat": 35.7}}')


def new() -> ToolCallParser:
    return create_tool_parser("llama3", 0, FUNCTIONS)


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (PARIS, "", [PARIS_CALL]),
        (f"\n\n{PARIS}\n", "", [PARIS_CALL]),
        (f"<|python_tag|>{PARIS}", "", [PARIS_CALL]),
        (f"<|python_tag|>{PARIS}; <|python_tag|>{TOKYO}", "", [PARIS_CALL, TOKYO_CALL]),
        (f"{PARIS}; {TOKYO}", "", [PARIS_CALL, TOKYO_CALL]),
        (f"{PARIS}\n{TOKYO}\n{PARIS}", "", [PARIS_CALL, TOKYO_CALL, PARIS_CALL]),
        (PARIS + TOKYO, "", [PARIS_CALL, TOKYO_CALL]),
        (f"{PARIS}; ", "", [PARIS_CALL]),
        ('{"name": "f", "arguments": {"x": 1}}', "", [("f", '{"x": 1}')]),
        ('{"name": "f", "parameters": "{\\"x\\": [1, 2]}"}', "", [("f", '{"x": [1, 2]}')]),
        ('{"parameters": {"x": 1}, "name": "f"}', "", [("f", '{"x": 1}')]),
        ('{"name": "f"}', "", [("f", "{}")]),
        # text
        ("", "", []),
        (" \n", " \n", []),
        ("It rains in Paris.", "It rains in Paris.", []),
        (f"I call: {PARIS}", f"I call: {PARIS}", []),
        ('{"city": "Paris", "name": "get_weather"}', '{"city": "Paris", "name": "get_weather"}', []),
        (' {"name": "Bob", "parameters": {}}', ' {"name": "Bob", "parameters": {}}', []),
        ('{"type": "function"}', '{"type": "function"}', []),
        ('{"name": 5}', '{"name": 5}', []),
        ("{}", "{}", []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|python", "<|python", []),
        ('{"na', '{"na', []),
        (f"{PARIS} So it rains.", "", [PARIS_CALL]),
        (f'{PARIS}; {{"x": 1}}', "", [PARIS_CALL]),
        # truncated or broken
        (PARIS[:-20], "", [("get_weather", '{"city": "Paris",')]),
        (f"{PARIS}; {TOKYO[:30]}", "", [PARIS_CALL]),
        ('{"name": "f", "para', "", [("f", "")]),
        ('{"name": "f", "parameters": {"x": oops}} and more', "", [("f", '{"x": ')]),
        ('{"name": "f", "parameters": {"x": [1}} and more', "", [("f", '{"x": [1')]),
    ],
)
def test_llama3_parser_separates_text_and_calls(text: str, answer: str, calls: list[tuple[str, str]]) -> None:
    check_stage(new, text, ("", answer, calls), MARKERS)


def test_llama3_parser_accepts_any_name_without_schemas() -> None:
    check_stage(lambda: create_tool_parser("llama3", 0, {}), '{"name": "g"}', ("", "", [("g", "{}")]))


def test_llama3_parser_releases_other_json_early() -> None:
    parser = new()
    parser.feed(split_text('{"city'))
    assert fold(parser.feed(split_text('": '))) == ("", '{"city": ', [])


WORDS = [PARIS, TOKYO, PARIS[:50], '{"name": "f"', "}", "; ", "\n", "{", '"', "text", "<|python_tag|>", "<|", ","]


@given(st.data(), st.lists(st.sampled_from(WORDS), max_size=8))
def test_llama3_parser_is_independent_of_splits(data: st.DataObject, parts: list[str]) -> None:
    text = "".join(parts)
    whole = fold(run_stage(new(), split_text(text), at_once=True))
    assert fold(run_stage(new(), split_text(text, data.draw(split_points(text))))) == whole
    assert fold(run_stage(new(), split_text(text, range(len(text)), MARKERS))) == whole
