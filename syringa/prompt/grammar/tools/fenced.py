"""Grammar of calls in a Markdown code block, which a model may write under `auto` instead of its own format.

It accepts what `output.tools.fenced_calls` reads as calls; any other code block is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from syringa.output_formats import FENCE_END
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.lark import escape_regex, not_starting_with
from syringa.prompt.grammar.tools.base import MAX_CALLS, callable_tools

_WHITESPACE = r"[ \t\r\n]*"
_GAP = r"[ \t\r\n]{0,16}"  # where a model could go on writing whitespace
_NAME = _WHITESPACE.join((r"\{", '"name"', ":", '"'))
_ARGUMENTS = _WHITESPACE.join(("", ",", '"(arguments|parameters)"', ":"))
_HEAD = rf"{_WHITESPACE}\[?{_WHITESPACE}{_NAME}"


def block_rules(use: ToolUse, text_rules: Callable[[str, str], list[str]]) -> list[str]:
    """Return rules whose `block` is all that may follow the begin of a code block, calls or text, to the end.

    `text_rules(name, terminal)` returns the rules of text to the end that starts with the terminal; `rest` is any such
    text. The arguments of the first tool follow the rule `arguments_0`. The block turns into text wherever it can no
    longer be a call. It is read in three parts, since one terminal for each tool would be too many expressions.
    """
    tools = callable_tools(use)
    names = [json.dumps(f'{tool.name}"') for tool in tools]
    any_name = f'({"|".join(escape_regex(tool.name) for tool in tools)})"'
    lines = [
        # Lazy: a complete part of the head is taken as such instead of continuing the text.
        f"block_head[lazy]: /{_HEAD}/",
        f"block_arguments[lazy]: /{_ARGUMENTS}/",
        f"NO_HEAD: {not_starting_with(_HEAD)}",
        f"NO_NAME: {not_starting_with(any_name)}",
        f"NO_ARGUMENTS: {not_starting_with(_ARGUMENTS)}",
        *text_rules("no_head", "NO_HEAD"),
        *text_rules("no_name", "NO_NAME"),
        *text_rules("no_arguments", "NO_ARGUMENTS"),
        f"BLOCK_GAP: /{_GAP}/",
        rf"OBJECT_END: /{_GAP}\}}/",
        rf"BLOCK_END: /{_GAP}\]?{_GAP}{FENCE_END}/",
        "block: block_head block_call | no_head",
    ]
    called = [f"{name} (block_arguments block_{index} | no_arguments)" for index, name in enumerate(names)]
    lines.append(f"block_call: {' | '.join(called)} | no_name")
    lines += [f"block_{index}: BLOCK_GAP arguments_{index} OBJECT_END block_rest" for index in range(len(tools))]
    if not use.parallel:
        return [*lines, "block_rest: BLOCK_END"]
    following = [f"{name} block_arguments BLOCK_GAP arguments_{index} OBJECT_END" for index, name in enumerate(names)]
    return [
        *lines,
        f"NEXT_HEAD: /{_GAP},?{_GAP}{_NAME}/",
        f"block_next: NEXT_HEAD ({' | '.join(following)})",
        f"block_rest: block_next{{0,{MAX_CALLS - 1}}} BLOCK_END rest",
    ]
