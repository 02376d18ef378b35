"""Round trip of calls in every format with JSON arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import fold, run_stage, split_points, split_text
from tests.prompt.grammar.tools.json_formats import JSON_FORMATS, JsonFormatCase

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.text("abcXYZ_-019", min_size=1, max_size=6)
calls = st.lists(st.tuples(names, st.dictionaries(st.text(max_size=5), values, max_size=4)), min_size=1, max_size=3)


@pytest.mark.parametrize("family", JSON_FORMATS, ids=[family.format for family in JSON_FORMATS])
@given(
    written=calls,
    before=st.sampled_from(["", "\n", "Well: <3 [x] \n"]),
    after=st.sampled_from(["", " \n"]),
    data=st.data(),
)
@settings(deadline=None)
def test_parser_returns_the_calls_that_were_written(
    family: JsonFormatCase, written: list[tuple[str, dict[str, Any]]], before: str, after: str, data: st.DataObject
) -> None:
    before = before if family.text_before else ""
    text = before + family.write(written) + after
    markers = data.draw(st.sampled_from([(), family.markers]))
    segments = split_text(text, data.draw(split_points(text)), markers)
    parser = create_tool_parser(family.format, 0, {name: {} for name, _ in written})
    _, answer, found = fold(run_stage(parser, segments, at_once=data.draw(st.booleans())))
    assert answer == (before if before.strip() else "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == written
    assert parser.calls == len(written)
