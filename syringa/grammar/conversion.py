"""Conversion of a `Grammar` to llguidance, its limits, and llguidance's error messages in plain English."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits

from syringa.errors import InvalidRequest
from syringa.types import Grammar

_MAX_MESSAGE = 400  # characters

_NOTHING_MATCHES = "nothing matches it: its parts contradict each other, or a rule refers to itself without end"
_TOO_COMPLEX = "its regular expressions are too complex"
# The first pattern found in a message of llguidance replaces the whole message.
_PLAIN_MESSAGES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), message)
    for pattern, message in (
        (r"^(NoExtension(Bias)?|InternalError)$", _NOTHING_MATCHES),
        (r"Unable to determine if regex is empty", f"{_TOO_COMPLEX} where several apply at once"),
        (
            r"Unsatisfiable schema: Regex is empty",
            "Unsatisfiable schema: no text satisfies all constraints on a string",
        ),
        (r"fuel exhausted|lexer precomputation failed|lexer configuration .* too big", _TOO_COMPLEX),
        (r"too many (expressions|states)", f"{_TOO_COMPLEX}: too many states"),
        (r"Too many items|Current row has \d+ items", "it is too ambiguous: too many ways to parse the same text"),
        (r"circular references with sibling keys", "a circular $ref cannot have other keywords beside it"),
    )
]


def to_llguidance(grammar: Grammar) -> str:
    """Return the grammar as llguidance reads it.

    Raises `InvalidRequest` for a value that is not even JSON; other errors show when it is compiled.
    """
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.value))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.value))
    if grammar.kind == "json_schema":
        return _schema_to_llguidance(grammar.value)
    # llguidance would take other text for Lark, and report an error in the wrong language.
    if not grammar.value.lstrip().startswith("{"):
        raise invalid_grammar('an llguidance grammar is a JSON object: {"grammars": [...]}')
    return grammar.value


def parser_limits() -> LLParserLimits:
    """Return the limits for one grammar. A step's fuel is about 14,000 a millisecond, a lexer state up to 2 kB.

    `step_max_items` is the loosest limit: ordinary grammars need under 5,000 items for 49,000 tokens, and an ambiguous
    one takes 200 ms for 50,000.
    """
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # otherwise an error contains the parser's state and the whole grammar
    )


def invalid_grammar(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid grammar: {plain_message(reason)}", param="grammar", code="invalid_grammar")


def plain_message(message: str) -> str:
    """Return a message of llguidance in plain English where it has a translation, and at most `_MAX_MESSAGE` long."""
    message = message.replace("<non-verbose/>", "").strip()
    message = next((plain for pattern, plain in _PLAIN_MESSAGES if pattern.search(message)), message)
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " …"


def _schema_to_llguidance(schema: str) -> str:
    # Options can only be attached to an object; `true` and `{}` mean the same.
    if schema.strip() == "true":
        schema = "{}"
    try:
        # With flexible whitespace, a small model may write blanks without end.
        return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
    except ValueError as error:
        raise invalid_grammar(f"not a JSON schema: {error}") from error
