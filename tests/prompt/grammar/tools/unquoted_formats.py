"""Writers of the tool-call formats without JSON arguments, and sampling from a grammar."""

from __future__ import annotations

import json
import random
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from syringa.grammar import to_llguidance
from syringa.output_formats import GEMMA_FORMATS, TAGGED_FORMATS, ToolCallFormat
from syringa.types import Grammar
from tests.prompt.grammar.matching import byte_tokenizer

FORMATS: list[ToolCallFormat] = [*TAGGED_FORMATS, *GEMMA_FORMATS]
MARKERS: dict[ToolCallFormat, tuple[str, ...]] = {
    "qwen-coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek-dsml": ("｜DSML｜",),
    **{name: (markers.begin, markers.end, markers.quote) for name, markers in GEMMA_FORMATS.items()},
}


def vocabularies(format: ToolCallFormat) -> list[tokenizers.Tokenizer]:
    """Return tokenizers with the markers as text, as special tokens and as other added tokens."""
    return [byte_tokenizer(), byte_tokenizer(*MARKERS[format]), byte_tokenizer(plain=MARKERS[format])]


def written(format: ToolCallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls as the model writes them."""
    if format in GEMMA_FORMATS:
        begin, end = GEMMA_FORMATS[format].begin, GEMMA_FORMATS[format].end
        return "".join(f"{begin}call:{name}{gemma(format, arguments)}{end}" for name, arguments in calls)
    tags = TAGGED_FORMATS[format]
    each = [_call(format, name, arguments) for name, arguments in calls]
    if tags.multiple_calls:
        return "\n".join((tags.begin, *each, tags.end))
    line = "\n" if tags.call_end else ""
    return "\n".join(f"{tags.begin}{line}{call}{line}{tags.end}" for call in each)


def gemma(format: ToolCallFormat, value: Any) -> str:
    quote = GEMMA_FORMATS[format].quote
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(format, each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(format, each) for each in value) + "]"
    return json.dumps(value)


def _call(format: ToolCallFormat, name: str, arguments: dict[str, Any]) -> str:
    tags = TAGGED_FORMATS[format]
    lines = [f"{tags.call_begin}{name}{tags.name_end}"]
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        attribute = f' string="{str(is_text).lower()}"' if tags.type_attribute else ""
        gap, pad = "\n" if format == "glm" else "", "\n" if tags.padded else ""
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        lines.append(
            f"{tags.key_begin}{key}{tags.key_end}{attribute}{gap}{tags.value_begin}{pad}{text}{pad}{tags.value_end}"
        )
    return "\n".join([*lines, tags.call_end])


def draw(grammar: Grammar, tokenizer: tokenizers.Tokenizer, seed: int, endings: list[str]) -> str | None:
    """Sample a text from the grammar, with some endings preferred; None if it does not end."""
    chance = random.Random(seed)
    eos = tokenizer.token_to_id("<eos>")
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=eos), to_llguidance(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ends = [tokenizer.encode(text).ids for text in endings]
    tokens: list[int] = []
    while len(tokens) < 1500:
        if matcher.is_accepting() and chance.random() < 0.5:
            return _text(tokenizer, tokens)
        chosen = chance.choice(ends) if ends and chance.random() < 0.3 else []
        if not chosen or matcher.validate_tokens(chosen) < len(chosen):
            bias = matcher.compute_logit_bias()
            allowed = [token for token, allow in enumerate(bias) if allow and token != eos]
            if not allowed:
                return _text(tokenizer, tokens) if matcher.is_accepting() else None
            plain = [token for token in allowed if token not in (220, 10)]  # fewer non-ASCII letters
            chosen = [chance.choice(plain or allowed)]
        assert matcher.consume_tokens(chosen), matcher.get_error()
        tokens += chosen
    return None


def _text(tokenizer: tokenizers.Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False))
