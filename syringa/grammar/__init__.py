"""Grammars in llguidance's terms. The API server checks grammars and the engine runs them with the same code, so that
what one accepts the other compiles. Must not import torch."""

from syringa.grammar.conversion import invalid_grammar, parser_limits, plain_message, to_llguidance

__all__ = ["invalid_grammar", "parser_limits", "plain_message", "to_llguidance"]
