"""Feeds a stage one text in many cuttings: what comes out must not depend on how it was cut."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import Piece
from syringa.output.stages import Part, Stage, Thought


def pieces(text: str, cuts: Sequence[int] = (), marks: Sequence[str] = ()) -> list[Piece]:
    """The text cut at `cuts`; each of `marks` is a special piece of its own."""
    out: list[Piece] = []
    at = 0
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    for part in parts:
        if part in marks:
            out.append(Piece(part, 1, special=True))
        else:
            places = [0, *sorted({cut - at for cut in cuts if 0 < cut - at < len(part)}), len(part)]
            out += [Piece(part[a:b]) for a, b in itertools.pairwise(places) if a < b]
        at += len(part)
    return out


def run(stage: Stage, given: list[Piece], *, at_once: bool = False) -> list[Part]:
    out: list[Part] = []
    for some in [given] if at_once else [[piece] for piece in given]:
        out += stage.feed(some)
    out += stage.flush()
    counted = sum(part.tokens for part in out if isinstance(part, Piece | Thought))
    assert counted == sum(piece.tokens for piece in given)
    return out


def told(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """The thought, the answer and the calls."""
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    answer = "".join(part.text for part in parts if isinstance(part, Piece) and not part.special)
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            calls.append((part.name, ""))
        elif isinstance(part, ToolCallDelta):
            calls[part.call] = (calls[part.call][0], calls[part.call][1] + part.arguments)
    return thought, answer, calls


def check(
    new: Callable[[], Stage], text: str, expected: tuple[str, str, list[tuple[str, str]]], marks: Sequence[str] = ()
) -> None:
    """All at once, character by character, in thirds, and with marks as tokens of their own."""
    for cuts in (range(len(text)), (), range(0, len(text), 3)):
        for special in (marks, ()):
            given = pieces(text, list(cuts), special)
            assert told(run(new(), given)) == expected, given
            assert told(run(new(), given, at_once=True)) == expected, given


def some_cuts(text: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(text)), max_size=12)
