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
def test_every_family(format: ReasoningFormat) -> None:
    begin, end = REASONING_MARKERS[format].begin, REASONING_MARKERS[format].end
    thought = "Two plus two,\n\nsays the user: <b>. 四"
    for text in (f"{begin}{thought}{end}Four.", f"\n{begin}\n{thought}\n{end}\n\nFour."):
        check_stage(lambda: stage(format), text, (thought, "Four.", []), MARKERS[format])
    check_stage(
        lambda: stage(format, opened=True), f"{thought}\n{end}\n\nFour.", (thought, "Four.", []), MARKERS[format]
    )
    check_stage(
        lambda: stage(format, opened=True),
        f"{begin}\n{thought}\n{end}\n\nFour.",
        (thought, "Four.", []),
        MARKERS[format],
    )


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
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
def test_where_a_thought_ends(text: str, opened: bool, thought: str, answer: str) -> None:
    check_stage(lambda: stage(opened=opened), text, (thought, answer, []))


def test_text_is_passed_on_as_it_comes() -> None:
    thoughts = stage()
    thoughts.feed([TextSegment("<think>")])
    assert fold(thoughts.feed([TextSegment("one")])) == ("one", "", [])
    assert fold(thoughts.feed([TextSegment(" two")])) == (" two", "", [])
    thoughts.feed([TextSegment("</think>")])
    assert fold(thoughts.feed([TextSegment("Four")])) == ("", "Four", [])


def test_other_marks_keep_their_place() -> None:
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
def test_cuts_do_not_matter(data: st.DataObject, text: str, opened: bool) -> None:
    cut = split_text(text, data.draw(split_points(text)))
    assert fold(run_stage(stage(opened=opened), cut)) == fold(
        run_stage(stage(opened=opened), split_text(text), at_once=True)
    )
