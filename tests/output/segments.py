"""Run a stage on one text split in many ways: the result must not depend on the split."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import TextSegment
from syringa.output.stages import ReasoningSegment, Segment, Stage


def split_text(text: str, positions: Sequence[int] = (), markers: Sequence[str] = ()) -> list[TextSegment]:
    """Split the text at `positions`; each of `markers` becomes a special token of its own."""
    out: list[TextSegment] = []
    at = 0
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    for part in parts:
        if part in markers:
            out.append(TextSegment(part, 1, special=True))
        else:
            bounds = [0, *sorted({each - at for each in positions if 0 < each - at < len(part)}), len(part)]
            out += [TextSegment(part[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
        at += len(part)
    return out


def run_stage(stage: Stage, given: list[TextSegment], *, at_once: bool = False) -> list[Segment]:
    out: list[Segment] = []
    for some in [given] if at_once else [[piece] for piece in given]:
        out += stage.feed(some)
    out += stage.flush()
    counted = sum(part.tokens for part in out if isinstance(part, TextSegment | ReasoningSegment))
    counted += getattr(stage, "dropped", 0)  # of a tool-call parser
    assert counted == sum(piece.tokens for piece in given)
    return out


def fold(segments: Sequence[Segment]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning, the answer and the calls."""
    reasoning = "".join(part.text for part in segments if isinstance(part, ReasoningSegment))
    answer = "".join(part.text for part in segments if isinstance(part, TextSegment) and not part.special)
    calls: list[tuple[str, str]] = []
    for part in segments:
        if isinstance(part, ToolCallStart):
            calls.append((part.name, ""))
        elif isinstance(part, ToolCallDelta):
            calls[part.call] = (calls[part.call][0], calls[part.call][1] + part.arguments)
    return reasoning, answer, calls


def check_stage(
    new: Callable[[], Stage], text: str, expected: tuple[str, str, list[tuple[str, str]]], markers: Sequence[str] = ()
) -> None:
    """Check the text as a whole, by character, in threes, and with markers as special tokens."""
    for positions in (range(len(text)), (), range(0, len(text), 3)):
        for special in (markers, ()):
            given = split_text(text, list(positions), special)
            assert fold(run_stage(new(), given)) == expected, given
            assert fold(run_stage(new(), given, at_once=True)) == expected, given


def split_points(text: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(text)), max_size=12)
