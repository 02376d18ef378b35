from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.output.detokenizer import Piece
from syringa.output.reasoning import Thoughts
from syringa.output_formats import THOUGHTS, ThoughtFormat
from tests.output.cuts import check, pieces, run, some_cuts, told

MARKS: dict[ThoughtFormat, tuple[str, ...]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "kimi-vl": ("◁think▷", "◁/think▷"),
    "gemma": ("<|channel>", "<channel|>"),
}


def stage(format: ThoughtFormat = "think", opened: bool = False) -> Thoughts:
    return Thoughts(THOUGHTS[format], opened=opened)


@pytest.mark.parametrize("format", MARKS)
def test_every_family(format: ThoughtFormat) -> None:
    begin, end = THOUGHTS[format].begin, THOUGHTS[format].end
    thought = "Two plus two,\n\nsays the user: <b>. 四"
    for text in (f"{begin}{thought}{end}Four.", f"\n{begin}\n{thought}\n{end}\n\nFour."):
        check(lambda: stage(format), text, (thought, "Four.", []), MARKS[format])
    check(lambda: stage(format, opened=True), f"{thought}\n{end}\n\nFour.", (thought, "Four.", []), MARKS[format])
    check(
        lambda: stage(format, opened=True), f"{begin}\n{thought}\n{end}\n\nFour.", (thought, "Four.", []), MARKS[format]
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
    check(lambda: stage(opened=opened), text, (thought, answer, []))


def test_text_is_passed_on_as_it_comes() -> None:
    thoughts = stage()
    thoughts.feed([Piece("<think>")])
    assert told(thoughts.feed([Piece("one")])) == ("one", "", [])
    assert told(thoughts.feed([Piece(" two")])) == (" two", "", [])
    thoughts.feed([Piece("</think>")])
    assert told(thoughts.feed([Piece("Four")])) == ("", "Four", [])


def test_other_marks_keep_their_place() -> None:
    given = [
        Piece("<think>"),
        Piece("a"),
        Piece("<x>", 1, special=True),
        Piece("</think>b"),
        Piece("<y>", special=True),
    ]
    out = run(stage(), given)
    assert [part.text for part in out if isinstance(part, Piece) and part.special] == ["<x>", "<y>"]
    assert told(out) == ("a", "b", [])


@given(st.data(), st.text("<think>/ \nab", max_size=30), st.booleans())
def test_cuts_do_not_matter(data: st.DataObject, text: str, opened: bool) -> None:
    cut = pieces(text, data.draw(some_cuts(text)))
    assert told(run(stage(opened=opened), cut)) == told(run(stage(opened=opened), pieces(text), at_once=True))
