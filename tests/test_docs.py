"""The tables in docs/ are what the code says. `python -m tests.test_docs` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from syringa import config
from syringa.api.completions import CompletionRequest

DOCS = Path(__file__).parents[1] / "docs"

# What is refused, and why. A field that is not here is honoured.
REFUSED = {
    "tools": "refused for now unless empty or with `tool_choice: none`",
    "tool_choice": "`none`; anything else is refused for now",
}
NOTES = {
    "model": "an id from `/v1/models`, an alias, or `default`; absent: the default model",
    "prompt": "a string, an array of strings, token ids, arrays of token ids; absent: the document-start token",
    "max_tokens": "default 16; 0 with `echo`, to score a text",
    "stream": "server-sent events",
    "stream_options": "`include_usage`; `include_obfuscation` is refused",
    "echo": "the prompt comes back before the completion, with its log-probabilities if `logprobs` is set",
    "suffix": "appended after the completion",
    "logprobs": "0 to 5 alternatives per token",
    "best_of": "at least `n`, at most 20; draws that many, returns the best by mean log-probability; not with `stream`",
    "user": "kept with the request",
    "temperature": "0 to 2, default 1; 0 is greedy",
    "top_p": "above 0, at most 1; default 1",
    "top_k": "-1 or 0: off",
    "min_p": "0 to 1",
    "seed": "the same seed gives the same bytes",
    "frequency_penalty": "-2 to 2, over generated tokens",
    "presence_penalty": "-2 to 2, over generated tokens",
    "repetition_penalty": "above 0, over prompt and output; 1: off",
    "logit_bias": "token id to -100 … 100",
    "stop": "a string, or up to four",
    "n": "1 to 128",
    "dry_multiplier": "0: off",
    "dry_base": "default 1.75",
    "dry_allowed_length": "default 2",
    "dry_sequence_breakers": 'default `["\\n", ":", "\\"", "*"]`',
    "grammar": "`{type: regex, json_schema, lark or llguidance, value}`",
    "response_format": "`text`, `json_object`, `json_schema`",
    "ignore_eos": "end tokens do not end the answer",
    "min_tokens": "end and stop tokens cannot come earlier",
    "stop_token_ids": "tokens that end the answer",
    "truncate_sequence": "keeps the newest tokens that fit instead of refusing a long prompt",
}


def settings_table() -> str:
    lines = ["| setting | flag and variable | default | what it does |", "| --- | --- | --- | --- |"]
    for name, field in config.FIELDS.items():
        kind: Any = config.bare_type(name)
        choices = " ".join(f"`{each}`" for each in get_args(kind)) if "Literal" in str(kind) else ""
        default = field.default
        shown = "none" if default == () else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        flag = f"`--{name.replace('_', '-')}` `{config.variable(name)}`"
        lines.append(f"| `{name}` | {flag} | {shown} | {config.describe(name)} {choices} |".replace("  |", " |"))
    return "\n".join(lines)


def completions_table() -> str:
    lines = ["| field | | |", "| --- | --- | --- |"]
    for field in msgspec.structs.fields(CompletionRequest):
        word = "refused" if field.name in REFUSED else "honoured"
        lines.append(f"| `{field.name}` | {word} | {REFUSED.get(field.name) or NOTES[field.name]} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"configuration.md": settings_table, "completions.md": completions_table}


def with_table(text: str, table: str) -> str:
    """The page with whatever stands between its two marks replaced."""
    before, _, rest = text.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end -->")
    return f"{before}<!-- table -->\n{table}\n<!-- end -->{after}"


@pytest.mark.parametrize("page", TABLES)
def test_tables_are_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == with_table(text, TABLES[page]()), "run: python -m tests.test_docs"


if __name__ == "__main__":
    for page, table in TABLES.items():
        path = DOCS / page
        path.write_text(with_table(path.read_text(), table()))
