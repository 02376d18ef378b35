"""Helpers to test which texts a grammar allows."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, pre_tokenizers

from syringa.grammar import to_llguidance
from syringa.output_formats import ToolCallFormat
from syringa.prompt.chat.tools import Tool, ToolUse, close_schema
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.output_grammar import build_output_grammar
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "$defs": {"city": {"type": "string", "maxLength": 12}},
}
WEATHER = Tool(name="weather", description="Tells it.", parameters=SCHEMA, schema=close_schema(SCHEMA))
STRICT = Tool(name="weather", parameters=SCHEMA, schema=close_schema(SCHEMA), strict=True)
TIME = Tool(name="time")


def use(mode: Any = "required", *tools: Tool, names: str = "weather time", parallel: bool = True) -> ToolUse:
    return ToolUse(tools=tools or [WEATHER, TIME], mode=mode, callable=frozenset(names.split()), parallel=parallel)


@cache
def byte_tokenizer(*special: str, plain: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per byte, and the given added tokens."""
    vocab = {character: id_ for id_, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in ("<eos>", *special)])
    tokenizer.add_tokens([tokenizers.AddedToken(each, special=False) for each in plain])
    return tokenizer


def lark_vocabulary(tokenizer: tokenizers.Tokenizer) -> LarkVocabulary:
    """Return the same as `Tokenizer.lark_vocabulary`."""
    added = tokenizer.get_added_tokens_decoder().items()
    return LarkVocabulary(
        {each.content: id_ for id_, each in added if each.special or re.fullmatch("<.*>", each.content)}
    )


def call_grammar(
    tools: ToolUse, format: ToolCallFormat = "plain", tokenizer: tokenizers.Tokenizer | None = None
) -> Grammar:
    """Return the validated grammar of a model without reasoning."""
    grammar = build_output_grammar(lark_vocabulary(tokenizer or byte_tokenizer()), tools=tools, tool_call_format=format)
    assert grammar is not None
    validate_grammar(grammar)
    return grammar


def follows(grammar: Grammar, text: str, tokenizer: tokenizers.Tokenizer | None = None) -> bool:
    """Return whether the grammar accepts the whole text."""
    tokenizer = tokenizer or byte_tokenizer()
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<eos>")), to_llguidance(grammar), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
