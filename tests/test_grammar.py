"""Tests of `syringa.grammar`: the Lark tokenizer, special tokens by id, and llguidance's messages in plain English."""

from __future__ import annotations

import json
import time

import pytest

from syringa.errors import InvalidRequest
from syringa.grammar import plain_message
from syringa.grammar.lark import resolve_special_tokens, tokenize
from syringa.types import Grammar

IDS = {"<turn>": 1, "<|im_end|>": 2}
LARK = (
    'start: <turn> "a<turn>" /<turn>\\/<turn>/ <[5]> <[^3-4]> // <turn>\nx: <|im_end|> # <turn>\ny: %json {"<turn>": 1}'
)


def test_resolve_special_tokens_leaves_strings_and_comments_alone() -> None:
    wanted = LARK.replace("start: <turn>", "start: <[1]>").replace("x: <|im_end|>", "x: <[2]>")
    assert resolve_special_tokens(Grammar("lark", LARK), IDS).value == wanted
    parts = {"grammars": [{"lark_grammar": LARK}, {"json_schema": {"const": "<turn>"}}]}
    found = json.loads(resolve_special_tokens(Grammar("llguidance", json.dumps(parts)), IDS).value)
    assert found == {"grammars": [{"lark_grammar": wanted}, {"json_schema": {"const": "<turn>"}}]}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "<turn>"),
        Grammar("json_schema", '{"const": "<turn>"}'),
        Grammar("llguidance", '{"lark_grammar": 1}'),
        Grammar("llguidance", '{"grammars": ["lark_grammar"]}'),
        Grammar("lark", 'start: "unclosed <turn>'),
        Grammar("lark", "start: /unclosed <turn>"),
        Grammar("lark", ""),
    ],
    ids=str,
)
def test_resolve_special_tokens_leaves_other_grammars_alone(grammar: Grammar) -> None:
    assert resolve_special_tokens(grammar, IDS) == grammar


def test_resolve_special_tokens_names_an_unknown_token() -> None:
    with pytest.raises(InvalidRequest, match=r"no special token <nope>\."):
        resolve_special_tokens(Grammar("lark", "start: <nope>"), IDS)


@pytest.mark.parametrize("text", [LARK, "a\n", "/\\/" * 100_000, '"\\"' * 100_001, "<" * 300_000, "<a " * 100_000])
def test_tokenize_is_lossless_and_linear(text: str) -> None:
    started = time.process_time()
    assert "".join(token.text for token in tokenize(text)) == text
    if "turn" not in text:
        assert resolve_special_tokens(Grammar("lark", text), IDS).value == text
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (
            "?start: a?b",
            [("modifier", "?"), ("name", "start"), ("operator", ":"), ("name", "a"), ("operator", "?"), ("name", "b")],
        ),
        (
            "  !r: _A->x",
            [("modifier", "!"), ("name", "r"), ("operator", ":"), ("name", "_A"), ("operator", "->"), ("name", "x")],
        ),
        (
            'A: "a".."c"i~1..2',
            [
                ("name", "A"),
                ("operator", ":"),
                ("string", '"a"'),
                ("operator", ".."),
                ("string", '"c"i'),
                ("operator", "~"),
                ("number", "1"),
                ("operator", ".."),
                ("number", "2"),
            ],
        ),
        (
            '%ignore /b/i %json <x> "y',
            [
                ("directive", "%ignore"),
                ("regex", "/b/i"),
                ("embedded", "%json"),
                ("special", "<x>"),
                ("unterminated", '"y'),
            ],
        ),
    ],
)
def test_tokenize_kinds(text: str, tokens: list[tuple[str, str]]) -> None:
    assert [(token.kind, token.text) for token in tokenize(text) if token.kind != "whitespace"] == tokens


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("NoExtensionBias", "nothing matches it"),
        ("Unable to determine if regex is empty:  (And (SearchRegex /a/))", "regular expressions are too complex"),
        ("lexer precomputation failed; either increase limits.initial_lexer_fuel", "too complex"),
        ("parser error: Too many items (limit 50000; mask); try avoiding short lexemes", "too ambiguous"),
        ("<non-verbose/> unclosed group", "unclosed group"),
        ("at 17(6): initial lexer configuration (grammar) too big (limit: 1000000)\n 1 | A: B B", "are too complex"),
        ("x" * 1000, "xxx …"),
    ],
)
def test_plain_message_hides_internals(message: str, expected: str) -> None:
    assert expected in plain_message(message)
    assert "limit" not in plain_message(message)
    assert "(And" not in plain_message(message)
