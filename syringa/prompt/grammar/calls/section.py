"""What a family's file gives: how calls are written from the mark that begins them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from syringa.prompt.chat.tools import ANY_ARGUMENTS, Tool, ToolUse

MAX_CALLS = 8  # under `required`

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """`trigger` is the text that begins it, and `lines` are Lark rules; the rule `section` is all that follows.

    A section is one call, or where a format has marks around all calls, these calls with their closing mark.
    """

    trigger: str
    lines: list[str]
    repeats: bool = False  # whether another section may follow; else `section` has several calls itself, if allowed
    between: str = ""  # Lark: what stands between two sections under `required`
    # Where text may not come before calls: what an answer of them begins with under `auto`, as Lark, and a regular
    # expression for the start of any answer that would be taken for one.
    opening: str = ""
    excluded: str = ""


def callable_tools(use: ToolUse) -> list[Tool]:
    return [tool for tool in use.tools if tool.name in use.callable]


def is_held(tool: Tool, use: ToolUse) -> bool:
    """Whether the arguments are held to the tool's schema."""
    return tool.strict or use.held or use.mode == "required"


def json_arguments(tool: Tool, use: ToolUse) -> str:
    """Lark: a tool's arguments as one JSON object."""
    schema = tool.schema if is_held(tool, use) else ANY_ARGUMENTS
    return "%json " + json.dumps({**schema, "x-guidance": _LAYOUT})


def json_value(schema: Any) -> str:
    """Lark: any value that fits a schema, as JSON."""
    kept = schema if isinstance(schema, dict) else {}
    return "%json " + json.dumps({**kept, "x-guidance": _LAYOUT})


def one_of(rule: str, names: Sequence[str]) -> str:
    return f"{rule}: {' | '.join(names)}"


def several(call: str, between: str, use: ToolUse) -> str:
    """Lark: one call or more, as many as the request allows."""
    return f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if use.parallel else call
