"""Calls in a Markdown code block, which some models write instead of their own format.

The block holds `{"name": …, "arguments": {…}}`, or several such objects, also as a list. Any other block is text. The
grammar of these calls is `prompt.grammar.tools.fenced`.
"""

from __future__ import annotations

from collections.abc import Collection

from syringa.output.tools.json_reader import WHITESPACE

_ARGUMENTS = ('"arguments"', '"parameters"')


def read_call_head(text: str, at: int, functions: Collection[str]) -> tuple[str, int] | bool | None:
    """Read `{"name": …, "arguments": {` from `at` on, and return the name and the position of the arguments.

    Return False if this is no call of one of the functions, None if more input is needed.
    """
    names = tuple(f'"{name}"' for name in functions)
    name = ""
    for expected in (("{",), ('"name"',), (":",), names, (",",), _ARGUMENTS, (":",)):
        rest = text[at:].lstrip(WHITESPACE)
        found = next((each for each in expected if rest.startswith(each)), None)
        if found is None:
            return None if any(each.startswith(rest) for each in expected) else False
        at = len(text) - len(rest) + len(found)
        name = found[1:-1] if expected is names else name
    rest = text[at:].lstrip(WHITESPACE)
    if not rest:
        return None
    return (name, len(text) - len(rest)) if rest[0] == "{" else False
