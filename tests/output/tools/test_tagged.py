"""Behavior shared by the formats with a tag for each argument."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import TextSegment
from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import TAGGED_FORMATS, ToolCallFormat
from tests.output.segments import fold, run_stage, split_points, split_text
from tests.tiers import examples

FORMATS: list[ToolCallFormat] = ["qwen-coder", "glm", "minimax", "deepseek-dsml"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"type": "string"}]},
        "box": {"$ref": "#/$defs/box"},
    },
    "$defs": {"box": {"type": "object", "properties": {"html": {"type": "string"}}}},
}
PARAMETERS = {"f": SCHEMA}


def parameter(format: ToolCallFormat, key: str, value: str, *, string: bool = True) -> str:
    tags = TAGGED_FORMATS[format]
    attribute = f' string="{str(string).lower()}"' if tags.type_attribute else ""
    gap = "\n" if format == "glm" else ""
    pad = "\n" if tags.padded else ""
    head = f"{tags.key_begin}{key}{tags.key_end}{attribute}{gap}{tags.value_begin}"
    return f"{head}{pad}{value}{pad}{tags.value_end}\n"


def call(format: ToolCallFormat, name: str, *parameters: str) -> str:
    tags = TAGGED_FORMATS[format]
    return f"{tags.call_begin}{name}{tags.name_end}\n{''.join(parameters)}{tags.call_end}"


def section(format: ToolCallFormat, *calls: str) -> str:
    tags = TAGGED_FORMATS[format]
    if tags.multiple_calls:
        return "\n".join((tags.begin, *calls, tags.end))
    line = "\n" if tags.call_end else ""
    return "\n".join(f"{tags.begin}{line}{each}{line}{tags.end}" for each in calls)


def parse(format: ToolCallFormat, text: str, splits: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    parser = create_tool_parser(format, 0, PARAMETERS)
    _, answer, calls = fold(run_stage(parser, split_text(text, list(range(len(text))) if splits is None else splits)))
    assert parser.calls == len(calls)
    return answer, calls


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", "5", "5"),
        ("text", ' {"a": "\\b"}\n', ' {"a": "\\b"}\n'),
        ("text", "", ""),
        ("text", "\n\ntwo\n\n", "\n\ntwo\n\n"),
        ("text", "a < b </para </arg", "a < b </para </arg"),
        ("n", "5", 5),
        ("n", " 5\n", 5),
        ("n", "five", "five"),
        ("n", "True", True),
        ("n", "NaN", "NaN"),
        ("maybe", "5", 5),
        ("maybe", "null", None),
        ("maybe", "None", "None"),
        ("maybe", "5.5", "5.5"),
        ("maybe", "true", "true"),
        ("maybe", '"x"', '"x"'),
        ("maybe", "null and void", "null and void"),
        ("box", '{"html": "<b>\\"</b>"}', {"html": '<b>"</b>'}),
        ("unknown", "[1, 2]", [1, 2]),
        ("unknown", "[1, 2", "[1, 2"),
        ("unknown", "words", "words"),
        ("unknown", "-", "-"),
    ],
)
def test_values_have_the_type_in_the_schema(format: ToolCallFormat, key: str, value: str, expected: Any) -> None:
    if TAGGED_FORMATS[format].type_attribute:
        text = parameter(format, key, value, string=isinstance(expected, str) and key != "n")
    else:
        text = parameter(format, key, value)
    whole = section(format, call(format, "f", text))
    for splits in (None, []):
        answer, [(name, arguments)] = parse(format, whole, splits)
        assert (answer, name, json.loads(arguments)) == ("", "f", {key: expected})


@pytest.mark.parametrize("format", FORMATS)
def test_end_marker_inside_json_strings(format: ToolCallFormat) -> None:
    end = TAGGED_FORMATS[format].value_end
    value = json.dumps({"html": f"a {end} b {end}"}, ensure_ascii=False)
    more = parameter(format, "text", "x")
    whole = section(format, call(format, "f", parameter(format, "box", value, string=False), more))
    _, [(_, arguments)] = parse(format, whole)
    assert json.loads(arguments) == {"box": {"html": f"a {end} b {end}"}, "text": "x"}
    # An odd quote does not start a string that contains the rest.
    odd = section(format, call(format, "f", parameter(format, "box", '{"html: 5', string=False), more))
    _, [(_, arguments)] = parse(format, odd)
    assert json.loads(arguments) == {"box": '{"html: 5', "text": "x"}


@pytest.mark.parametrize("format", FORMATS)
def test_text_around_calls(format: ToolCallFormat) -> None:
    one, two = call(format, "f", parameter(format, "text", "x")), call(format, "g")
    whole = section(format, one, two)
    expected = [("f", '{"text": "x"}'), ("g", "{}")]
    assert parse(format, whole) == ("", expected)
    assert parse(format, f"\n\n{whole}\n ") == ("", expected)
    assert parse(format, f"Sure.\n{whole} So.") == ("Sure.\n", expected)
    assert parse(format, f"{whole}\n{section(format, two)}") == ("", [*expected, ("g", "{}")])


@pytest.mark.parametrize("format", FORMATS)
def test_text_that_resembles_a_call(format: ToolCallFormat) -> None:
    tags = TAGGED_FORMATS[format]
    for text in (
        f"The mark {tags.begin} begins a call.",
        f"{tags.begin}{tags.end}",
        f"  {tags.begin}{tags.begin} x y",
        f"{tags.begin}{tags.call_begin}no name{tags.name_end}{tags.end}",
        f"{tags.begin}{tags.call_begin}{'x' * 300}{tags.name_end}",
        tags.begin[:-1],
    ):
        assert parse(format, text) == parse(format, text, []) == (text, [])


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_call_keeps_what_was_read(format: ToolCallFormat) -> None:
    tags = TAGGED_FORMATS[format]
    head = section(format, call(format, "f", parameter(format, "n", "5", string=False)))
    head = head[: head.index(tags.value_end) + len(tags.value_end)]
    assert parse(format, head) == ("", [("f", '{"n": 5')])
    begun = parameter(format, "text", "Hello\nworld")
    begun = begun[: begun.index("world") + 3]
    assert parse(format, head + begun) == ("", [("f", '{"n": 5, "text": "Hello\\nwor')])
    assert parse(format, head + tags.key_begin + "te") == ("", [("f", '{"n": 5')])
    assert parse(
        format, head[: head.index("f") + 1] if not tags.call_begin else tags.begin + tags.call_begin + "f"
    ) == (
        "",
        [],
    )


@pytest.mark.parametrize("format", FORMATS)
def test_broken_calls_are_skipped(format: ToolCallFormat) -> None:
    tags = TAGGED_FORMATS[format]
    good = parameter(format, "text", "x")
    for broken in ("rubbish", f"{good}rubbish", f"{good}{tags.key_begin}text", f"{good}<x>"):
        if not tags.name_end and broken == "rubbish":
            continue  # without a marker after it, this is part of the name
        whole = f"{section(format, call(format, 'f', broken))} Well."
        arguments = '{"text": "x"}' if good in broken else "{}"
        assert parse(format, whole) == parse(format, whole, []) == ("", [("f", arguments)])
    # Without an end marker of the call.
    whole = f"{tags.begin}{tags.call_begin}f{tags.name_end}{good}{tags.end} Well."
    assert parse(format, whole) == ("", [("f", '{"text": "x"}')])


@pytest.mark.parametrize("format", FORMATS)
def test_tagged_parser_streams_strings(format: ToolCallFormat) -> None:
    parser = create_tool_parser(format, 0, PARAMETERS)
    whole = section(format, call(format, "f", parameter(format, "text", "Hello there")))
    head, _, tail = whole.partition("Hello there")
    out = parser.feed([TextSegment(head)])
    assert [type(part) for part in out] == [ToolCallStart, TextSegment]
    seen = [parser.feed([TextSegment(text)]) for text in ("Hel", "lo <", "b", *tail)]
    deltas = [[part.arguments for part in out if isinstance(part, ToolCallDelta)] for out in seen]
    assert deltas[:3] == [['{"text": "Hel'], ["lo "], ["<b"]]
    assert "".join(itertools.chain.from_iterable(deltas)) == '{"text": "Hello <b"}'


def fragments(format: ToolCallFormat) -> list[str]:
    tags = TAGGED_FORMATS[format]
    good = section(format, call(format, "f", parameter(format, "text", "x\n"), parameter(format, "box", '{"a": "b"}')))
    markers = [getattr(tags, field) for field in tags.__struct_fields__]
    markers = [each for each in markers if isinstance(each, str) and each not in ("", "always", "sometimes")]
    return [good, good[: len(good) // 2], *markers, "f", "text", '"', "{", "\n", " ", "<", "é", "\\", "5"]


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(deadline=None, max_examples=examples(80))
def test_tagged_parser_is_independent_of_splits(format: ToolCallFormat, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(format)), max_size=14)))
    splits = data.draw(split_points(text))
    assert parse(format, text, splits) == parse(format, text, []) == parse(format, text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("format", FORMATS)
@given(text=st.text(max_size=12), value=values, data=st.data())
@settings(deadline=None, max_examples=examples(60))
def test_tagged_parser_returns_the_arguments_that_were_written(
    format: ToolCallFormat, text: str, value: Any, data: st.DataObject
) -> None:
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    key = "text" if isinstance(value, str) else "unknown"
    string = isinstance(value, str)
    parameters = (parameter(format, "text", text), parameter(format, key, written, string=string))
    whole = section(format, call(format, "f", *parameters))
    _, [(_, arguments)] = parse(format, whole, data.draw(split_points(whole)))
    assert json.loads(arguments) == {"text": text, key: value}
