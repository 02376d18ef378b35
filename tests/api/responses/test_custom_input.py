"""Tests of the parser of custom tool input."""

from __future__ import annotations

import json

import pytest

from syringa.api.responses.custom_input import CustomInputParser


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted"\\ \n\t é 😀', "\u2028 \x01"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_custom_input_parser_streams_text(text: str, ascii_only: bool, size: int) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=ascii_only)
    parser = CustomInputParser()
    pieces = [parser.feed(whole[at : at + size]) for at in range(0, len(whole), size)]
    assert "".join(pieces) + parser.flush() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut sh', "cut sh"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "\\ud83d alone \\ude00 \\ud83d\\n"}', "\ufffd alone \ufffd \ufffd\n"),
        ('{"query": "x"}', '{"query": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("", ""),
    ],
)
def test_custom_input_parser_returns_odd_arguments_unchanged(arguments: str, text: str) -> None:
    parser = CustomInputParser()
    assert parser.feed(arguments) + parser.flush() == text
