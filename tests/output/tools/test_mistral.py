from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.events import ToolCallStart
from syringa.output.tools.base import ToolCallParser
from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import ToolCallFormat
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

MARKERS = ("[TOOL_CALLS]",)
ARGS_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}'
TOKYO = '{"name": "get_weather", "arguments": {"city": "東京 \\"]\\" \\u00e9", "at": {"lat": 35.7}}}'
PARIS_CALL = ("get_weather", '{"city": "Paris", "days": [1, 2]}')
TOKYO_CALL = ("get_weather", '{"city": "東京 \\"]\\" \\u00e9", "at": {"lat": 35.7}}')


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (f"[TOOL_CALLS] [{PARIS}]", "", [PARIS_CALL]),
        (f"[TOOL_CALLS][{PARIS}, {TOKYO}]", "", [PARIS_CALL, TOKYO_CALL]),
        (f"\n[TOOL_CALLS] [{PARIS},\n {TOKYO} ]\n", "", [PARIS_CALL, TOKYO_CALL]),
        (f"[TOOL_CALLS]{PARIS}", "", [PARIS_CALL]),
        (f"Let me see.\n\n[TOOL_CALLS][{PARIS}] Done.", "Let me see.\n\n", [PARIS_CALL]),
        (f"[TOOL_CALLS][{PARIS}][TOOL_CALLS] [{TOKYO}]", "", [PARIS_CALL, TOKYO_CALL]),
        ('[TOOL_CALLS][{"name": "f"}]', "", [("f", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": "{\\"x\\": 1}", "id": "abcdefghi"}]', "", [("f", '{"x": 1}')]),
        # no call
        ("[TOOL_CALLS] are made so", "[TOOL_CALLS] are made so", []),
        (" [TOOL_CALLS][]", " [TOOL_CALLS][]", []),
        ("[TOOL", "[TOOL", []),
        ('[TOOL_CALLS][{"x": 1}]', '[TOOL_CALLS][{"x": 1}]', []),
        # truncated or broken
        ("[TOOL_CALLS]", "", []),
        (f"[TOOL_CALLS][{PARIS}, ", "", [PARIS_CALL]),
        (f"[TOOL_CALLS][{PARIS[:-12]}", "", [("get_weather", '{"city": "Paris", "day')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"x": oops}}] So.', "", [("f", '{"x": ')]),
    ],
)
def test_mistral_parser_reads_lists_of_calls(text: str, answer: str, calls: list[tuple[str, str]]) -> None:
    check_stage(lambda: create_tool_parser("mistral", 0, {}), text, ("", answer, calls), MARKERS)


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Zoë"}', "", [("get_weather", '{"city": "Zoë"}')]),
        ('[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"x": "[ARGS]"}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"x": "[ARGS]"}'), ("g", "{}")]),
        ('I look.[TOOL_CALLS]f[ARGS]{"x": {"y": [1]}} Well.', "I look.", [("f", '{"x": {"y": [1]}}')]),
        ('[TOOL_CALLS]f{"x": 1}', "", [("f", '{"x": 1}')]),
        ("[TOOL_CALLS]f[ARGS][TOOL_CALLS]g[ARGS] {}", "", [("f", "{}"), ("g", "{}")]),
        ('[TOOL_CALLS]f[ARGS]"{\\"x\\": 1}"', "", [("f", '{"x": 1}')]),
        # no call
        ("[TOOL_CALLS] is a mark[ARGS]{}", "[TOOL_CALLS] is a mark[ARGS]{}", []),
        ("[TOOL_CALLS]\n\n\nx\ny", "[TOOL_CALLS]\n\n\nx\ny", []),
        # truncated or broken
        ("[TOOL_CALLS]get_wea", "", []),
        ('[TOOL_CALLS]f[ARGS]{"x": "y', "", [("f", '{"x": "y')]),
        ('[TOOL_CALLS]f[ARGS]{"x": oops[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"x": '), ("g", "{}")]),
        ("[TOOL_CALLS]f[ARGS]oops", "", [("f", "")]),
    ],
)
def test_mistral_args_parser_reads_names_before_arguments(text: str, answer: str, calls: list[tuple[str, str]]) -> None:
    check_stage(lambda: create_tool_parser("mistral-args", 0, {}), text, ("", answer, calls), ARGS_MARKERS)


def ids(parser: ToolCallParser, text: str) -> list[str]:
    return [part.id for part in run_stage(parser, split_text(text)) if isinstance(part, ToolCallStart)]


def test_mistral_call_ids_are_nine_letters_and_digits() -> None:
    (own,) = ids(
        create_tool_parser("mistral", 0, {}), '[TOOL_CALLS][{"id": "aB3456789", "name": "f", "arguments": {}}]'
    )
    assert own == "aB3456789"
    assert ids(create_tool_parser("mistral-args", 0, {}), "[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}") == ["aB3456789"]
    made = ids(create_tool_parser("mistral", 0, {}), '[TOOL_CALLS][{"id": "call_1", "name": "f"}, {"name": "f"}]')
    made += ids(
        create_tool_parser("mistral-args", 0, {}), "[TOOL_CALLS]f[CALL_ID]call_1234[ARGS]{}[TOOL_CALLS]f[ARGS]{}"
    )
    assert len(set(made)) == 4
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in made)


WORDS = ["[TOOL_CALLS]", "[", "]", PARIS, TOKYO, '{"name": "f"', "}", ", ", "[ARGS]", "[CALL_ID]", "f", " ", "{", '"']


@pytest.mark.parametrize(("format", "markers"), [("mistral", MARKERS), ("mistral-args", ARGS_MARKERS)])
@given(st.data(), st.lists(st.sampled_from(WORDS), max_size=10))
def test_mistral_parser_is_independent_of_splits(
    format: ToolCallFormat, markers: tuple[str, ...], data: st.DataObject, parts: list[str]
) -> None:
    text = "".join(parts)
    whole = fold(run_stage(create_tool_parser(format, 0, {}), split_text(text), at_once=True))
    assert fold(run_stage(create_tool_parser(format, 0, {}), split_text(text, data.draw(split_points(text))))) == whole
    assert fold(run_stage(create_tool_parser(format, 0, {}), split_text(text, range(len(text)), markers))) == whole
