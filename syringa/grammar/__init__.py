"""A `Grammar` in llguidance's own terms. Shared by the API process, which checks grammars, and the engine, which runs
them, so that what one accepts the other compiles. No torch."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from syringa.errors import InvalidRequest
from syringa.grammar.words import plain
from syringa.types import Grammar

_LONGEST_MESSAGE = 400


def lower(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises `InvalidRequest` for what is not even JSON; the rest shows later."""
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.value))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.value))
    if grammar.kind == "json_schema":
        return _lower_schema(grammar.value)
    # llguidance would take other text for Lark, and answer with an error about the wrong language.
    if not grammar.value.lstrip().startswith("{"):
        raise invalid_grammar('an llguidance grammar is a JSON object: {"grammars": [...]}')
    return grammar.value


def parser_limits() -> LLParserLimits:
    """What one grammar may cost. A step's fuel is some 14,000 a millisecond, a lexer state up to 2 kB.

    Items of a step are the widest bound: ordinary grammars need under 5,000 for 49,000 tokens, and an ambiguous one
    takes 200 ms for 50,000.
    """
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # otherwise an error carries the parser's state and the whole grammar
    )


def invalid_grammar(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid grammar: {brief(reason)}", param="grammar", code="invalid_grammar")


def brief(message: str) -> str:
    """One of llguidance's messages, in plain words where we have some; a few quote the whole grammar."""
    message = plain(message.replace("<non-verbose/>", "").strip())
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + " …"


def _lower_schema(schema: str) -> str:
    # Options can only be attached to an object; `true` and `{}` mean the same.
    if schema.strip() == "true":
        schema = "{}"
    try:
        # With free whitespace, a small model may go on writing blanks for ever.
        return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
    except ValueError as error:
        raise invalid_grammar(f"not a JSON schema: {error}") from error
