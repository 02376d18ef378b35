"""The notations of Gemma 4 and FunctionGemma, which differ only in their markers."""

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
from syringa.output_formats import GEMMA_FORMATS, ToolCallFormat
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text
from tests.tiers import examples

FORMATS: list[ToolCallFormat] = ["gemma", "function-gemma"]


def with_markers(format: ToolCallFormat, text: str) -> str:
    """Replace `«` and `»` by the markers around a call, and `"` by the quote marker."""
    markers = GEMMA_FORMATS[format]
    return text.replace("«", markers.begin).replace("»", markers.end).replace('"', markers.quote)


def notation(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{notation(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(notation, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        ('«call:get_weather{city:"Paris"}»', "", [("get_weather", '{"city": "Paris"}')]),
        (
            '«call:set{n:12,x:-1.5e3,on:true,off:false,none:null,list:[1,"a, b}",[]],of:{k:"v",deep:{a:[{}]}}}»',
            "",
            [
                (
                    "set",
                    '{"n": 12, "x": -1.5e3, "on": true, "off": false, "none": null, "list": [1, "a, b}", []], '
                    '"of": {"k": "v", "deep": {"a": [{}]}}}',
                )
            ],
        ),
        ('«call:a{}»«call:b{t:"x\ny\\"}»', "", [("a", "{}"), ("b", '{"t": "x\\ny\\\\"}')]),
        ('Sure.\n«call:a{ k : "v" , n : 1 }» Done.', "Sure.\n", [("a", '{"k": "v", "n": 1}')]),
        ('«call:a{"odd key":1,é:"ü"}»', "", [("a", '{"odd key": 1, "é": "ü"}')]),
        (
            "«call:a{x:None,y:True,z:some words,l:[1,],}»",
            "",
            [("a", '{"x": null, "y": true, "z": "some words", "l": [1]}')],
        ),
        # no call
        ("The mark « begins a call.", "The mark « begins a call.", []),
        ("«call:»", "«call:»", []),
        ("«call:no name{}»", "«call:no name{}»", []),
        (f"«call:{'x' * 300}{{}}»", f"«call:{'x' * 300}{{}}»", []),
        ("««call:a{}»", "«", [("a", "{}")]),
        # truncated
        ("x «call:a", "x ", []),
        ("«call:a{ke", "", [("a", "{")]),
        ('«call:a{key:"val', "", [("a", '{"key": "val')]),
        ("«call:a{key:[1,2", "", [("a", '{"key": [1')]),
        ("«call:a{key:1}", "", [("a", '{"key": 1}')]),
        # broken
        ("«call:a{k:1,rubbish}» So.", "", [("a", '{"k": 1}')]),
        ('«call:a{k:["x" y]}» So.', "", [("a", '{"k": ["x"]}')]),
        ('«call:a{k:"open}» So.', "", [("a", '{"k": "open}"}')]),
        ("«call:a{k:{n:1» So.", "", [("a", '{"k": {"n": 1}}')]),
        ("«call:a{k:,}» So.", "", [("a", "{}")]),
        ("«call:a{} and so on", "", [("a", "{}")]),
    ],
)
def test_gemma_parser_separates_text_and_calls(
    format: ToolCallFormat, text: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    markers = GEMMA_FORMATS[format]
    every = (markers.begin, markers.end, markers.quote)
    expected = ("", with_markers(format, answer), calls)
    check_stage(lambda: create_tool_parser(format, 0, {}), with_markers(format, text), expected, every)


@pytest.mark.parametrize("format", FORMATS)
def test_gemma_parser_streams_strings(format: ToolCallFormat) -> None:
    parser = create_tool_parser(format, 0, {})
    out = parser.feed(
        [TextSegment(with_markers(format, "«call:f")), TextSegment("{"), TextSegment(with_markers(format, 'k:"'))]
    )
    assert [part.name for part in out if isinstance(part, ToolCallStart)] == ["f"]
    seen = [parser.feed([TextSegment(text)]) for text in ("Hel", "lo <", "b", *with_markers(format, '",n:1'), "2}")]
    deltas = [[part.arguments for part in out if isinstance(part, ToolCallDelta)] for out in seen]
    assert deltas[:3] == [['"k": "Hel'], ["lo "], ["<b"]]
    assert "".join(itertools.chain.from_iterable(deltas)) == '"k": "Hello <b", "n": 12}'


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(deadline=None, max_examples=examples(100))
def test_gemma_parser_is_independent_of_splits(format: ToolCallFormat, data: st.DataObject) -> None:
    parts = [
        '«call:f{k:"v",n:[1,{a:true}]}»',
        "«call:g{",
        "«",
        "»",
        '"',
        "k:",
        "{",
        "}",
        "[",
        "]",
        ",",
        "5",
        "x y",
        " ",
        "<",
    ]
    text = with_markers(format, "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14))))
    splits = data.draw(split_points(text))
    found = [
        fold(run_stage(create_tool_parser(format, 0, {}), split_text(text, each)))
        for each in (splits, [], range(len(text)))
    ]
    assert found[0] == found[1] == found[2]


keys = st.text("abcxyz_", min_size=1, max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6).filter(lambda text: not set(text) & set('"«»')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("format", FORMATS)
@given(arguments=st.dictionaries(keys, values, max_size=4), data=st.data())
@settings(deadline=None, max_examples=examples(80))
def test_gemma_parser_returns_the_arguments_that_were_written(
    format: ToolCallFormat, arguments: dict[str, Any], data: st.DataObject
) -> None:
    text = with_markers(format, f"«call:f{notation(arguments)}»")
    splits = data.draw(split_points(text))
    _, _, [(_, raw)] = fold(run_stage(create_tool_parser(format, 0, {}), split_text(text, splits)))
    assert json.loads(raw) == arguments
