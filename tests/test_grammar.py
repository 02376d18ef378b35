"""What both processes know of grammars: Lark cut into words, tokens by id, and llguidance's messages in plain words."""

from __future__ import annotations

import json
import time

import pytest

from syringa.errors import InvalidRequest
from syringa.grammar import brief
from syringa.grammar.lark import by_id, words
from syringa.types import Grammar

IDS = {"<turn>": 1, "<|im_end|>": 2}
LARK = (
    'start: <turn> "a<turn>" /<turn>\\/<turn>/ <[5]> <[^3-4]> // <turn>\nx: <|im_end|> # <turn>\ny: %json {"<turn>": 1}'
)


def test_special_tokens_go_by_their_ids_and_texts_stay() -> None:
    wanted = LARK.replace("start: <turn>", "start: <[1]>").replace("x: <|im_end|>", "x: <[2]>")
    assert by_id(Grammar("lark", LARK), IDS).value == wanted
    parts = {"grammars": [{"lark_grammar": LARK}, {"json_schema": {"const": "<turn>"}}]}
    found = json.loads(by_id(Grammar("llguidance", json.dumps(parts)), IDS).value)
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
def test_other_grammars_stay_as_they_are(grammar: Grammar) -> None:
    assert by_id(grammar, IDS) == grammar


def test_a_token_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"no special token <nope>\."):
        by_id(Grammar("lark", "start: <nope>"), IDS)


@pytest.mark.parametrize("text", [LARK, "a\n", "/\\/" * 100_000, '"\\"' * 100_001, "<" * 300_000, "<a " * 100_000])
def test_every_text_is_cut_at_once(text: str) -> None:
    started = time.process_time()
    assert "".join(word.text for word in words(text)) == text
    if "turn" not in text:
        assert by_id(Grammar("lark", text), IDS).value == text
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("NoExtensionBias", "nothing fits it"),
        ("Unable to determine if regex is empty:  (And (SearchRegex /a/))", "regular expressions are too complex"),
        ("lexer precomputation failed; either increase limits.initial_lexer_fuel", "too complex"),
        ("parser error: Too many items (limit 50000; mask); try avoiding short lexemes", "too ambiguous"),
        ("<non-verbose/> unclosed group", "unclosed group"),
        ("x" * 1000, "xxx …"),
    ],
)
def test_messages_are_plain(message: str, says: str) -> None:
    assert says in brief(message)
    assert "limit" not in brief(message)
    assert "(And" not in brief(message)
