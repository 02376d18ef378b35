"""Terminals of unquoted strings, by keyword."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from syringa.prompt.grammar.schema import ENFORCED_FORMATS
from syringa.prompt.grammar.tools.flat_schema import flatten
from syringa.prompt.grammar.tools.string_terminals import FORMAT_REGEXES, text_terminal
from tests.tiers import examples

BYTES = LLTokenizer("byte")


def fits(
    schema: Any, text: str, without: tuple[str, ...] = (), unlike: tuple[str, ...] = (), not_first: str = ""
) -> bool:
    [flat] = flatten(schema, schema)
    grammar = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {text_terminal(flat, without, unlike, not_first)}")
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ["", "a\nb", "é"], []),
        ({"minLength": 2, "maxLength": 3}, ["éé", "a\nb", "𝔸𝔸𝔸"], ["é", "abcd"]),
        ({"minLength": 1}, ["x" * 500], [""]),
        ({"enum": ["a", 'b"\\\n', ""]}, ["a", 'b"\\\n', ""], ["b", '"a"']),
        ({"enum": ["a", "abc", 5], "maxLength": 2}, ["a"], ["abc", "5"]),
        ({"const": "x/y"}, ["x/y"], ["x"]),
        ({"pattern": "b"}, ["b", "abc", "\nb\n"], ["ac", ""]),
        ({"pattern": "^ab*$"}, ["a", "abb"], ["ba", "abc", "a\n"]),
        ({"pattern": "^a|b$"}, ["a", "ax", "xb"], ["xax", "bx"]),
        ({"pattern": "(^a|b$)"}, ["ax", "xb"], ["bx"]),
        ({"pattern": r"^\d\w\s$"}, ["5a "], ["٥a ", "5é "]),
        ({"pattern": r"^[\d_]\$[/]\/$"}, ["5$//"], ["a$//"]),
        ({"pattern": r"^[|^$(]\|$"}, ["||", "^|", "(|"], ["x|"]),
        ({"pattern": "^(?:a|b){2}$"}, ["ab"], ["a", "abc"]),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["ab", "ba"], ["a"]),
        ({"format": "unknown"}, ["anything"], []),
    ],
)
def test_text_terminal_enforces_keywords(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert fits(schema, text), text
    for text in bad:
        assert not fits(schema, text), text


def test_text_terminal_excludes_markers_and_patterns() -> None:
    assert fits({}, "a</p", ("</p>",))
    assert not fits({}, "a</p>b", ("</p>",))
    assert not fits({}, "12", unlike=("[0-9]+",))
    assert fits({}, "12a", unlike=("[0-9]+",))
    assert text_terminal({"values": ["</p>", 5]}, ["</p>"]) is None


@pytest.mark.parametrize("markers", [("</p>",), ('<|"|>', "<tool_call|>"), ("<ab>", "<a-c>")])
@given(data=st.data())
@settings(deadline=None, max_examples=examples(60))
def test_text_terminal_excludes_markers(markers: tuple[str, ...], data: st.DataObject) -> None:
    parts = ["".join(sorted(set("".join(markers)))), *markers, *(marker[:-1] for marker in markers), *"<>/p|ac-b\n é"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    assert fits({}, text, markers) == (not any(mark in text for mark in markers))
    begun = text.strip()[:1]
    assert fits({}, text, not_first="-<[") == (not begun or begun not in "-<[")


FORMAT_TEXTS = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2023-13-01", "2023-04-31", "0000-01-01"],
    ),
    "time": (["12:00:00Z", "23:59:59.123+05:30"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
    "date-time": (["2024-01-01T00:00:00Z"], ["2024-01-01 00:00:00Z", "2024-01-01"]),
    "duration": (["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P4W"], ["P", "PT", "1D", "P1S", "P1W2D"]),
    "email": (["a@b.c", "first.last+tag@example.com"], ["a", "a@", ".a@b", "a@b..c"]),
    "hostname": (["localhost", "a-b.example.com"], ["-a", "a..b", "a_b", ""]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "2001:db8::1:0", "1:2:3:4:5:6:7::"],
        ["1:2:3:4:5:6:7", ":::", "1::2::3", "g::"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uri": (["https://example.com/a?b=c#d", "mailto:a@b.c", "urn:isbn:1"], ["example.com", "http://a b", "://x"]),
}


@pytest.mark.parametrize("name", sorted(FORMAT_REGEXES))
def test_format_regexes_follow_the_standards(name: str) -> None:
    good, bad = FORMAT_TEXTS[name]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for text in good:
        assert fits({"format": name}, text), text
        assert checker.conforms(text, name), text
    for text in bad:
        assert not fits({"format": name}, text), text


def test_every_enforced_format_has_a_regex() -> None:
    assert FORMAT_REGEXES.keys() == ENFORCED_FORMATS - {"unknown"}
