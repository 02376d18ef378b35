"""Grammars that clients write themselves, looked at before llguidance compiles them: how many intersections and
complements a terminal is made of, which cost without bound, and whether a rule can ever end.

Not for the grammars that we compose, which use both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from syringa.errors import InvalidRequest
from syringa.grammar import invalid_grammar, parser_limits, to_llguidance
from syringa.grammar.lark import LarkToken, tokenize
from syringa.prompt.grammar.schema_overlap import check_overlap
from syringa.types import Grammar

MOST_OPERATORS = 6  # `&` and `~` in one terminal, with those in the terminals that it names
MOST_CHARACTERS = 200_000
_MOST_WORK = 1_000_000  # words looked at in search of rules that end

_DECODER = json.JSONDecoder()
_SILENT = ("whitespace", "comment", "modifier")

Rules = dict[str, list[LarkToken]]


def validate_grammar(grammar: Grammar) -> None:
    """Raises `InvalidRequest` with the reason if the grammar does not compile.

    Without a tokenizer, names of special tokens go unchecked; a wrong one fails when the engine compiles the grammar.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(to_llguidance(grammar), None, limits=parser_limits())
    if failed:
        raise invalid_grammar("; ".join(messages))


def check_grammar_text(grammar: Grammar, path: str) -> None:
    """Raises `InvalidRequest` for a Lark or llguidance grammar that could take for ever to compile, or that nothing
    fits. What is wrong otherwise is for llguidance to say."""
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
    if len(text) > MOST_CHARACTERS:
        raise InvalidRequest(f"{path}: at most {MOST_CHARACTERS} characters, got {len(text)}.", param=path)
    try:
        _check_rules(_rules(text, path), path)
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply.", param=path) from None


def _check_rules(rules: Rules, path: str) -> None:
    counts: dict[str, int] = {}
    for name in rules:
        if _operators(name, rules, counts) > MOST_OPERATORS:
            raise InvalidRequest(
                f"{path}: at most {MOST_OPERATORS} of & and ~ can be in one terminal, with those that it names: {name} "
                "has more.",
                param=path,
            )
    ending = _ending(rules)
    if "start" in rules and "start" not in ending:
        name = _endless(rules, ending)
        raise InvalidRequest(f"{path}: the rule {name} refers to itself without end.", param=path)


def _check_schema(schema: Any, path: str) -> None:
    try:
        check_overlap(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}{error.param}: {error.message}", param=f"{path}{error.param}") from None


def _rules(text: str, path: str) -> Rules:
    """The words of each definition, behind its colon. Embedded schemas are checked, and are one word."""
    rules: Rules = {}
    current: list[LarkToken] | None = None
    head: str | None = None
    at_start, skip_to = True, 0
    for word in tokenize(text):
        if word.end <= skip_to or word.kind in _SILENT:
            continue
        if word.kind == "newline":
            at_start, head = True, None
            continue
        if at_start and word.kind in ("name", "directive"):
            head, current = word.text, None
        elif head is not None and word.text == ":":
            current, head = rules.setdefault(head, []), None
            if current:
                current.append(LarkToken("operator", "|", word.end))  # defined twice, which llguidance refuses
        elif current is not None:
            current.append(word)
        at_start = False
        if word.kind == "embedded":
            skip_to = _embedded(text, word, path)
    return rules


def _embedded(text: str, word: LarkToken, path: str) -> int:
    """Where the JSON behind a word ends."""
    begin = word.end
    while begin < len(text) and text[begin].isspace():
        begin += 1
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return word.end
    if word.text == "%json":
        _check_schema(value, path)
    return end


def _operators(name: str, rules: Rules, counts: dict[str, int]) -> int:
    """How many operators a terminal is made of. Without recursion: the client says how long a chain is."""
    todo = [name]
    while todo:
        current = todo[-1]
        if current in counts and counts[current] >= 0:
            todo.pop()
            continue
        inner = [word.text for word in rules[current] if word.kind == "name" and word.text in rules]
        inner = [each for each in inner if each.isupper() and current.isupper()]
        if current not in counts:
            counts[current] = -1  # begun
            todo += [each for each in inner if each not in counts]
        else:
            own = sum(_is_operator(word, rules[current], at) for at, word in enumerate(rules[current]))
            counts[current] = min(own + sum(max(0, counts[each]) for each in inner), MOST_OPERATORS + 1)
            todo.pop()
    return counts[name]


def _is_operator(word: LarkToken, body: list[LarkToken], at: int) -> bool:
    if word.kind != "operator" or word.text not in "&~":
        return False
    # `a~3` is a repetition.
    return word.text == "&" or at + 1 == len(body) or not body[at + 1].text.isdigit()


def _ending(rules: Rules) -> set[str]:
    """The rules of which some text can be derived."""
    users: dict[str, set[str]] = {}
    for name, body in rules.items():
        for word in body:
            if word.kind == "name" and word.text in rules:
                users.setdefault(word.text, set()).add(name)
    ending: set[str] = set()
    todo, work = dict.fromkeys(reversed(rules)), 0
    while todo:
        name, _ = todo.popitem()
        work += len(rules[name])
        if work > _MOST_WORK:
            return set(rules)  # llguidance will see
        if _can_end(iter(rules[name]), rules, ending):
            ending.add(name)
            todo |= {each: None for each in users.get(name, ()) if each not in ending}
    return ending


def _can_end(body: Iterator[LarkToken], rules: Rules, ending: set[str]) -> bool:
    """Whether one of the alternatives up to a closing bracket ends, if these rules do."""
    any_ends, this_ends, last_ends = False, True, True
    for word in body:
        if word.text in ("*", "?") or (word.text == "{" and (word := next(body, word)).text in ("0", ",")):
            last_ends = True  # it may be left out
            continue
        this_ends, last_ends = this_ends and last_ends, True
        if word.text in (")", "]"):
            break
        if word.text == "|":
            any_ends, this_ends = any_ends or this_ends, True
        elif word.text == "(":
            last_ends = _can_end(body, rules, ending)
        elif word.text == "[":
            _can_end(body, rules, ending)
        elif word.kind == "name" and word.text in rules:
            last_ends = word.text in ending
    return any_ends or (this_ends and last_ends)


def _endless(rules: Rules, ending: set[str]) -> str:
    """A rule on a circle from the start."""
    name, seen = "start", set()
    while name not in seen:
        seen.add(name)
        name = next((word.text for word in rules[name] if word.text in rules and word.text not in ending), name)
    return name
