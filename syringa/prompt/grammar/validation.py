"""Validation of grammars before they reach an engine.

`check_grammar_text` bounds the size of what clients write themselves, and refuses rules that never end.
`validate_grammar` compiles a grammar without a tokenizer. It has no limits: a server asks its grammar probe instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from syringa.errors import InvalidRequest
from syringa.grammar import invalid_grammar, parser_limits, to_llguidance
from syringa.grammar.lark import LarkToken, tokenize
from syringa.prompt.grammar.schema_recursion import check_recursion
from syringa.types import Grammar

MAX_CHARACTERS = 200_000
_MAX_WORK = 1_000_000  # tokens visited in the search for rules that end

_DECODER = json.JSONDecoder()
_IGNORED = ("whitespace", "comment", "modifier")

Rules = dict[str, list[LarkToken]]


def validate_grammar(grammar: Grammar) -> None:
    """Raise `InvalidRequest` with the reason if the grammar does not compile.

    Names of special tokens are not checked without a tokenizer; an unknown one fails when the engine compiles the
    grammar.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(to_llguidance(grammar), None, limits=parser_limits())
    if failed:
        raise invalid_grammar("; ".join(messages))


async def check_in_process(grammar: Grammar, tenant: str, salt: str | None) -> int:
    """Check a grammar in this process, without limits: for the command line, where the user writes the grammars."""
    await asyncio.to_thread(validate_grammar, grammar)
    return 0


def check_grammar_text(grammar: Grammar, path: str) -> None:
    """Raise `InvalidRequest` for a Lark or llguidance grammar that is too long, or that nothing matches.

    Other errors are left to llguidance.
    """
    if grammar.kind == "lark":
        _check_lark(grammar.value, path)
    elif grammar.kind == "llguidance":
        whole = json.loads(grammar.value)
        parts = whole.get("grammars") if isinstance(whole, dict) else None
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            inside = f"{path}.grammars[{index}]"
            if isinstance(part, dict) and isinstance(part.get("lark_grammar"), str):
                _check_lark(part["lark_grammar"], f"{inside}.lark_grammar")
            if isinstance(part, dict):
                _check_schema(part.get("json_schema"), f"{inside}.json_schema")


def _check_lark(text: str, path: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{path}: at most {MAX_CHARACTERS} characters, got {len(text)}.", param=path)
    try:
        _check_rules(_parse_rules(text, path), path)
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply.", param=path) from None


def _check_rules(rules: Rules, path: str) -> None:
    productive = _productive_rules(rules)
    if "start" in rules and "start" not in productive:
        name = _unproductive_rule(rules, productive)
        raise InvalidRequest(f"{path}: the rule {name} refers to itself without end.", param=path)


def _parse_rules(text: str, path: str) -> Rules:
    """Return the tokens of each definition after its colon. Embedded schemas are checked and count as one token."""
    rules: Rules = {}
    current: list[LarkToken] | None = None
    head: str | None = None
    at_start, skip_to = True, 0
    for token in tokenize(text):
        if token.end <= skip_to or token.kind in _IGNORED:
            continue
        if token.kind == "newline":
            at_start, head = True, None
            continue
        if at_start and token.kind in ("name", "directive"):
            head, current = token.text, None
        elif head is not None and token.text == ":":
            current, head = rules.setdefault(head, []), None
            if current:
                current.append(LarkToken("operator", "|", token.end))  # a second definition, which llguidance rejects
        elif current is not None:
            current.append(token)
        at_start = False
        if token.kind == "embedded":
            skip_to = _check_embedded(text, token, path)
    return rules


def _check_embedded(text: str, token: LarkToken, path: str) -> int:
    """Check the JSON after a token and return its end."""
    begin = token.end
    while begin < len(text) and text[begin].isspace():
        begin += 1
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return token.end
    if token.text == "%json":
        _check_schema(value, path)
    return end


def _check_schema(schema: Any, path: str) -> None:
    try:
        check_recursion(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}{error.param}: {error.message}", param=f"{path}{error.param}") from None


def _productive_rules(rules: Rules) -> set[str]:
    """Return the rules from which some finite text can be derived."""
    users: dict[str, set[str]] = {}
    for name, body in rules.items():
        for token in body:
            if token.kind == "name" and token.text in rules:
                users.setdefault(token.text, set()).add(name)
    productive: set[str] = set()
    stack, work = dict.fromkeys(reversed(rules)), 0
    while stack:
        name, _ = stack.popitem()
        work += len(rules[name])
        if work > _MAX_WORK:
            return set(rules)  # left to llguidance
        if _can_end(iter(rules[name]), rules, productive):
            productive.add(name)
            stack |= {each: None for each in users.get(name, ()) if each not in productive}
    return productive


def _can_end(body: Iterator[LarkToken], rules: Rules, productive: set[str]) -> bool:
    """Return whether one of the alternatives up to a closing bracket can end, given the productive rules."""
    any_ends, this_ends, last_ends = False, True, True
    for token in body:
        if token.text in ("*", "?") or (token.text == "{" and (token := next(body, token)).text in ("0", ",")):
            last_ends = True  # optional
            continue
        this_ends, last_ends = this_ends and last_ends, True
        if token.text in (")", "]"):
            break
        if token.text == "|":
            any_ends, this_ends = any_ends or this_ends, True
        elif token.text == "(":
            last_ends = _can_end(body, rules, productive)
        elif token.text == "[":
            _can_end(body, rules, productive)
        elif token.kind == "name" and token.text in rules:
            last_ends = token.text in productive
    return any_ends or (this_ends and last_ends)


def _unproductive_rule(rules: Rules, productive: set[str]) -> str:
    """Return a rule on a cycle that is reached from the start."""
    name, seen = "start", set()
    while name not in seen:
        seen.add(name)
        name = next((token.text for token in rules[name] if token.text in rules and token.text not in productive), name)
    return name
