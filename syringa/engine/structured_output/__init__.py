"""Structured output: grammars, and token masks computed from them."""
