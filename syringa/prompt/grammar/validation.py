"""Grammars on their way into a request: what cannot be compiled is refused here, before it reaches an engine."""

from __future__ import annotations

from llguidance import LLMatcher

from syringa.grammar import invalid_grammar, lower, parser_limits
from syringa.types import Grammar


def validate(grammar: Grammar) -> None:
    """Raises `InvalidRequest` with the reason if the grammar does not compile.

    Without a tokenizer, names of special tokens go unchecked; a wrong one fails when the engine compiles the grammar.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(lower(grammar), None, limits=parser_limits())
    if failed:
        raise invalid_grammar("; ".join(messages))
