"""Calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json

from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.section import callable_tools, json_arguments, one_of

NAME = '{"name": "'


def object_rules(use: ToolUse, *, key: str = "arguments", before: str = NAME, after: str = "") -> list[str]:
    """Lark: `call` is one of the functions that may be called. `before` stands before its name, `after` behind the
    object."""
    tools = callable_tools(use)
    lines = [one_of("call", [f"call_{index}" for index in range(len(tools))])]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{before}{json.dumps(tool.name)[1:]}, "{key}": ')
        lines.append(f"call_{index}: {head} arguments_{index} {json.dumps('}' + after)}")
        lines.append(f"arguments_{index}: {json_arguments(tool, use)}")
    return lines
