from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.output.detokenizer import TextSegment
from syringa.output.reasoning import ReasoningParser
from syringa.output_formats import REASONING_MARKERS, ReasoningFormat
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

MARKERS: dict[ReasoningFormat, tuple[str, ...]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "kimi-vl": ("◁think▷", "◁/think▷"),
    "gemma": ("<|channel>", "<channel|>"),
}


def stage(format: ReasoningFormat = "think", opened: bool = False) -> ReasoningParser:
    return ReasoningParser(REASONING_MARKERS[format], opened=opened)


@pytest.mark.parametrize("format", MARKERS)
def test_reasoning_is_parsed_in_every_format(format: ReasoningFormat) -> None:
    begin, end = REASONING_MARKERS[format].begin, REASONING_MARKERS[format].end
    reasoning = "Two plus two,\n\nsays the user: <b>. 四"
    for text in (f"{begin}{reasoning}{end}Four.", f"\n{begin}\n{reasoning}\n{end}\n\nFour."):
        check_stage(lambda: stage(format), text, (reasoning, "Four.", []), MARKERS[format])
    check_stage(
        lambda: stage(format, opened=True), f"{reasoning}\n{end}\n\nFour.", (reasoning, "Four.", []), MARKERS[format]
    )
    check_stage(
        lambda: stage(format, opened=True),
        f"{begin}\n{reasoning}\n{end}\n\nFour.",
        (reasoning, "Four.", []),
        MARKERS[format],
    )


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("Four.", False, "", "Four."),
        ("", False, "", ""),
        ("", True, "", ""),
        ("\n Four.", False, "", "\n Four."),
        ("<thin ice", False, "", "<thin ice"),
        ("<thi", False, "", "<thi"),
        ("Say <think>no</think>.", False, "", "Say <think>no</think>."),
        ("<think>cut", False, "cut", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("cut", True, "cut", ""),
        ("<think>a</think>", False, "a", ""),
        ("<think>a</think>\n\n", False, "a", ""),
        ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
        ("<think>a</think>b</think>c<think>", False, "a", "b</think>c<think>"),
        ("a < b </ c</think>d", True, "a < b </ c", "d"),
    ],
)
def test_reasoning_boundaries(text: str, opened: bool, reasoning: str, answer: str) -> None:
    check_stage(lambda: stage(opened=opened), text, (reasoning, answer, []))


def test_reasoning_and_text_are_streamed() -> None:
    parser = stage()
    parser.feed([TextSegment("<think>")])
    assert fold(parser.feed([TextSegment("one")])) == ("one", "", [])
    assert fold(parser.feed([TextSegment(" two")])) == (" two", "", [])
    parser.feed([TextSegment("</think>")])
    assert fold(parser.feed([TextSegment("Four")])) == ("", "Four", [])


def test_other_special_tokens_keep_their_position() -> None:
    given = [
        TextSegment("<think>"),
        TextSegment("a"),
        TextSegment("<x>", 1, special=True),
        TextSegment("</think>b"),
        TextSegment("<y>", special=True),
    ]
    out = run_stage(stage(), given)
    assert [part.text for part in out if isinstance(part, TextSegment) and part.special] == ["<x>", "<y>"]
    assert fold(out) == ("a", "b", [])


@given(st.data(), st.text("<think>/ \nab", max_size=30), st.booleans())
def test_reasoning_parser_is_independent_of_splits(data: st.DataObject, text: str, opened: bool) -> None:
    cut = split_text(text, data.draw(split_points(text)))
    assert fold(run_stage(stage(opened=opened), cut)) == fold(
        run_stage(stage(opened=opened), split_text(text), at_once=True)
    )
