from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import TextSegment
from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

SECTION, BEGIN, ARGUMENTS, END, SECTION_END = MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
PARIS, TOKYO = '{"city": "Paris"}', '{"city": "東京 \\n\\"都\\" <|tool", "at": {"lat": [35.7, true]}}'


def call(id: str, arguments: str) -> str:
    return f"{BEGIN}{id}{ARGUMENTS}{arguments}{END}"


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (SECTION + call("functions.get_weather:0", PARIS) + SECTION_END, "", [("get_weather", PARIS)]),
        (
            SECTION + call("functions.f:0", PARIS) + call("functions.g:1", TOKYO) + SECTION_END,
            "",
            [("f", PARIS), ("g", TOKYO)],
        ),
        (f"I look.\n{SECTION}\n{call(' functions.f:12 ', PARIS)}\n{SECTION_END}", "I look.\n", [("f", PARIS)]),
        (f"{SECTION}{call('functions.f:0', '')}{SECTION_END}", "", [("f", "{}")]),
        (SECTION + call("functions.f:0", '"{\\"x\\": 1}"') + SECTION_END, "", [("f", '{"x": 1}')]),
        (f"{call('f:0', PARIS)}{SECTION_END}{SECTION_END} So.", "", [("f", PARIS)]),
        # no call
        (f"The mark {SECTION} begins calls.", f"The mark {SECTION} begins calls.", []),
        (f"{BEGIN}{ARGUMENTS}", f"{BEGIN}{ARGUMENTS}", []),
        (f"{BEGIN}functions.:0{ARGUMENTS}", f"{BEGIN}functions.:0{ARGUMENTS}", []),
        ("<|tool_c", "<|tool_c", []),
        # truncated or broken
        (f"{SECTION}{BEGIN}functions.f", "", []),
        (f"{SECTION}{BEGIN}functions.f:0{ARGUMENTS}{TOKYO[:20]}", "", [("f", TOKYO[:20])]),
        (
            SECTION + call("functions.f:0", '{"x": 1') + call("functions.g:1", PARIS),
            "",
            [("f", '{"x": 1'), ("g", PARIS)],
        ),
        (f"{SECTION}{call('functions.f:0', '<x>')}{SECTION_END}", "", [("f", "")]),
    ],
)
def test_kimi_parser_separates_text_and_calls(text: str, answer: str, calls: list[tuple[str, str]]) -> None:
    check_stage(lambda: create_tool_parser("kimi", 0, {}), text, ("", answer, calls), MARKERS)


def test_kimi_parser_keeps_the_id_of_the_model() -> None:
    text = SECTION + call("functions.f:7", PARIS) + call("g:8", PARIS) + call("functions.h", PARIS)
    ids = [
        part.id
        for part in run_stage(create_tool_parser("kimi", 0, {}), split_text(text))
        if isinstance(part, ToolCallStart)
    ]
    assert ids == ["functions.f:7", "functions.g:8", "functions.h:2"]


def test_kimi_parser_streams_name_and_arguments() -> None:
    parser = create_tool_parser("kimi", 2, {})
    assert not [
        part for part in parser.feed(split_text(f"{SECTION}{BEGIN}functions.f:0")) if not isinstance(part, TextSegment)
    ]
    (start,) = [part for part in parser.feed(split_text(ARGUMENTS, (), MARKERS)) if not isinstance(part, TextSegment)]
    assert start == ToolCallStart(2, 0, "functions.f:0", "f")
    seen = [parser.feed([TextSegment(text)]) for text in ['{"ci', 'ty": "Par', 'is"}', END]]
    deltas = [[part.arguments for part in out if isinstance(part, ToolCallDelta)] for out in seen]
    assert deltas == [['{"ci'], ['ty": "Par'], ['is"}'], []]


WORDS = [*MARKERS, "functions.f:0", "f", "\n", PARIS, TOKYO, '{"x": ', "}", "1", " ", "<|", call("g:1", "{}")]


@given(st.data(), st.lists(st.sampled_from(WORDS), max_size=14))
def test_kimi_parser_is_independent_of_splits(data: st.DataObject, parts: list[str]) -> None:
    text = "".join(parts)
    whole = fold(run_stage(create_tool_parser("kimi", 0, {}), split_text(text), at_once=True))
    assert fold(run_stage(create_tool_parser("kimi", 0, {}), split_text(text, data.draw(split_points(text))))) == whole
    assert fold(run_stage(create_tool_parser("kimi", 0, {}), split_text(text, range(len(text)), MARKERS))) == whole
