from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import TextSegment
from syringa.output.stages import Segment
from syringa.output.tools.formats import create_tool_parser

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "}</tool_call>\\""]}}</tool_call>'
ARGUMENTS = '{"a": [1, "}</tool_call>\\""]}'


def parse(*texts: str, markers: tuple[str, ...] = ()) -> list[Segment]:
    parser = create_tool_parser("hermes", 3, {})
    out: list[Segment] = []
    for text in texts:
        out += parser.feed([TextSegment(text, 1, text in markers, 7 if text in markers else -1)])
    return [*out, *parser.flush(), TextSegment("", parser.dropped)]


def fold(out: list[Segment]) -> tuple[str, list[tuple[str, str]], int]:
    """Return the text, the calls and the number of tokens."""
    text, calls, tokens = "", [], 0
    for each in out:
        if isinstance(each, TextSegment):
            tokens += each.tokens
            text += "" if each.special else each.text
        elif isinstance(each, ToolCallStart):
            assert each.choice == 3
            assert each.call == len(calls)
            assert each.id.startswith("call_")
            calls.append((each.name, ""))
        else:
            assert each.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + each.arguments)
    return text, calls, tokens


@pytest.mark.parametrize(
    ("given_text", "text", "calls"),
    [
        ("", "", []),
        ("hello", "hello", []),
        (" \n", " \n", []),
        ("a < b <tool", "a < b <tool", []),
        (CALL, "", [("f", ARGUMENTS)]),
        (f"\n{CALL}\n", "", [("f", ARGUMENTS)]),
        (f"Sure. {CALL}\n{CALL} So.", "Sure. ", [("f", ARGUMENTS)] * 2),
        (f"{CALL}<tool", "", [("f", ARGUMENTS)]),
        ('<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "parameters": {}, "arguments": {"x": 1}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"id": 12, "name": "\\u0066", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}} and more', "", [("f", "{}")]),
        # truncated
        ("x <tool_call>", "x ", []),
        ('<tool_call>{"name": "f', "", []),
        ('<tool_call>{"name": "f", "arg', "", [("f", "")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
        # no call, possibly followed by one
        ("<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
        ('<tool_call>{"x": 5}</tool_call>', '<tool_call>{"x": 5}</tool_call>', []),
        (f"<tool_call>{CALL}", "<tool_call>", [("f", ARGUMENTS)]),
        (" \n<tool_call>no", " \n<tool_call>no", []),
        # broken after the name
        ('<tool_call>{"name": "f"</tool_call> x', "", [("f", "")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f" nonsense</tool_call> x', "", [("f", "")]),
    ],
)
def test_hermes_parser_separates_text_and_calls(given_text: str, text: str, calls: list[Any]) -> None:
    assert fold(parse(given_text)) == (text, calls, 1)
    assert fold(parse(*given_text)) == (text, calls, len(given_text))


def test_hermes_parser_streams_name_and_arguments() -> None:
    parser = create_tool_parser("hermes", 0, {})
    assert parser.feed([TextSegment("<tool_call>"), TextSegment('{"name": "f')]) == []
    start, *_ = parser.feed([TextSegment('", ')])
    assert isinstance(start, ToolCallStart)
    assert parser.calls == 1
    seen = [parser.feed([TextSegment(text)]) for text in ['"arguments": {"ci', 'ty": "Par', 'is"}}', "</tool_call>"]]
    pieces = [[each.arguments for each in out if isinstance(each, ToolCallDelta)] for out in seen]
    assert pieces == [['{"ci'], ['ty": "Par'], ['is"}'], []]


def test_hermes_parser_releases_text_early() -> None:
    parser = create_tool_parser("hermes", 0, {})
    assert parser.feed([TextSegment("a"), TextSegment(" "), TextSegment("b<"), TextSegment("c")]) == [
        TextSegment("a"),
        TextSegment(" "),
        TextSegment("b"),
        TextSegment("<", 0),
        TextSegment("c"),
    ]


def test_hermes_markers_may_be_special_tokens() -> None:
    markers = ("<tool_call>", "</tool_call>", "<eos>")
    out = parse("hi", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>", "<eos>", "x", markers=markers)
    assert fold(out) == ("hi", [("f", "{}")], 6)


words = st.lists(
    st.sampled_from([CALL, CALL[:40], '<tool_call>{"name": "g"', ', "arguments": {', "}", "x", ":", "<tool_call>"])
    | st.sampled_from(["</tool_call>", "<tool", " ", "\n", "é", '"', "5", "null"]),
    max_size=8,
)


@given(words, st.data())
@settings(deadline=None)
def test_hermes_parser_is_independent_of_splits(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *splits], [*splits, len(text)], strict=True)]
    assert fold(parse(text))[:2] == fold(parse(*pieces))[:2] == fold(parse(*text))[:2]
    assert fold(parse(*pieces))[2] == len(pieces)


def test_hermes_parser_ends_where_text_follows_a_call() -> None:
    parser = create_tool_parser("hermes", 0, {})
    parser.feed([TextSegment(CALL), TextSegment("\n"), TextSegment("<too"), TextSegment("l_call>\n{")])
    assert not parser.ended
    assert parser.feed([TextSegment("x"), TextSegment("y", 2)]) == []
    assert (parser.ended, parser.dropped) == (True, 6)
    assert parser.feed([TextSegment(CALL)]) == parser.flush() == []
    assert (parser.calls, parser.dropped) == (1, 7)
