from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import ToolCallFormat
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

SECTION, BEGIN, SEP, END, SECTION_END = MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
PARIS, TOKYO = '{"city": "Paris"}', '{"city": "東京 ``` \\"都\\"", "at": {"lat": [35.7, null]}}'


def block(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def bare(name: str, arguments: str) -> str:
    return f"{BEGIN}{name}{SEP}{arguments}{END}"


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (SECTION + block("f", PARIS) + SECTION_END, "", [("f", PARIS)]),
        (
            f"{SECTION}{block('get-weather', PARIS)}\n{block('g_2', TOKYO)}{SECTION_END}",
            "",
            [("get-weather", PARIS), ("g_2", TOKYO)],
        ),
        (f"I look it up.\n{SECTION}{block('f', PARIS)}{SECTION_END}", "I look it up.\n", [("f", PARIS)]),
        (f"\n\n{SECTION}\n{block('f', PARIS)}\n{SECTION_END}{SECTION_END}\n", "", [("f", PARIS)]),
        (f"{block('f', PARIS)} So.", "", [("f", PARIS)]),  # without a section
        (f"{SECTION}{BEGIN}function{SEP}f\n{PARIS}{END}{SECTION_END}", "", [("f", PARIS)]),  # without a code block
        (f"{SECTION}{BEGIN}function{SEP}f\n```json\n```{END}{SECTION_END}", "", [("f", "{}")]),
        (f"{SECTION}{BEGIN}function{SEP}f\n{END}{SECTION_END}", "", [("f", "{}")]),
        (SECTION + block("f", '"{\\"x\\": 1}"') + SECTION_END, "", [("f", '{"x": 1}')]),
        (SECTION + block("f", "null") + SECTION_END, "", [("f", "{}")]),
        # no call
        (f" {SECTION} begins calls", f" {SECTION} begins calls", []),
        (f"{BEGIN}something else", f"{BEGIN}something else", []),
        (f"{BEGIN}function{SEP}two words\n", f"{BEGIN}function{SEP}two words\n", []),
        ("a < b <｜tool", "a < b <｜tool", []),
        # truncated or broken
        (SECTION, "", []),
        (f"{SECTION}{BEGIN}function{SEP}get_w", "", []),
        (f"{SECTION}{BEGIN}function{SEP}f\n```js", "", [("f", "")]),
        ((SECTION + block("f", PARIS))[: -len(END) - 8], "", [("f", PARIS[:-4])]),
        (SECTION + block("f", '{"x": oops}') + block("g", PARIS) + SECTION_END, "", [("f", '{"x": '), ("g", PARIS)]),
    ],
)
def test_deepseek_parser_reads_code_blocks(text: str, answer: str, calls: list[tuple[str, str]]) -> None:
    check_stage(lambda: create_tool_parser("deepseek", 0, {}), text, ("", answer, calls), MARKERS)


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (SECTION + bare("f", PARIS) + SECTION_END, "", [("f", PARIS)]),
        (SECTION + bare("f", PARIS) + bare("g", TOKYO) + SECTION_END, "", [("f", PARIS), ("g", TOKYO)]),
        (f"Well.{SECTION}{bare('f', PARIS)}{SECTION_END} So.", "Well.", [("f", PARIS)]),
        (f"{SECTION}{bare('f', '')}{SECTION_END}", "", [("f", "{}")]),
        (f"{BEGIN}two\nlines{SEP}", f"{BEGIN}two\nlines{SEP}", []),
        (f"{BEGIN}{'x' * 300}", f"{BEGIN}{'x' * 300}", []),
        (f"{SECTION}{BEGIN}f{SEP}{PARIS[:-4]}", "", [("f", PARIS[:-4])]),
        (
            f'{SECTION}{BEGIN}f{SEP}{{"x": 1{END}{BEGIN}g{SEP}{{}}{END}{SECTION_END}',
            "",
            [("f", '{"x": 1'), ("g", "{}")],
        ),
    ],
)
def test_deepseek_v31_parser_reads_bare_arguments(text: str, answer: str, calls: list[tuple[str, str]]) -> None:
    check_stage(lambda: create_tool_parser("deepseek-v3.1", 0, {}), text, ("", answer, calls), MARKERS)


WORDS = [
    *MARKERS,
    "function",
    "f",
    "\n",
    "```json\n",
    "```",
    PARIS,
    TOKYO,
    '{"x": ',
    "}",
    "1",
    " ",
    "<｜",
    block("g", "{}"),
]


@pytest.mark.parametrize("format", ["deepseek", "deepseek-v3.1"])
@given(st.data(), st.lists(st.sampled_from(WORDS), max_size=14))
def test_deepseek_parser_is_independent_of_splits(
    format: ToolCallFormat, data: st.DataObject, parts: list[str]
) -> None:
    text = "".join(parts)
    whole = fold(run_stage(create_tool_parser(format, 0, {}), split_text(text), at_once=True))
    assert fold(run_stage(create_tool_parser(format, 0, {}), split_text(text, data.draw(split_points(text))))) == whole
    assert fold(run_stage(create_tool_parser(format, 0, {}), split_text(text, range(len(text)), MARKERS))) == whole
