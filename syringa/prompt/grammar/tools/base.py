"""The grammar of one tool-call format, and helpers for writing its Lark rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from syringa.prompt.chat.tools import ANY_ARGUMENTS, Tool, ToolUse

MAX_CALLS = 8  # under `required`

_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """Lark rules for calls from the marker that begins them.

    `trigger` is the text that begins a section, and the rule `section` in `lines` is what follows it: one call, or in
    formats with markers around all calls, these calls with the closing marker.
    """

    trigger: str
    lines: list[str]
    repeats: bool = False  # whether another section may follow; otherwise `section` itself may have several calls
    separator: str = ""  # Lark expression between two sections under `required`
    # For formats that allow no text before calls: the start of an answer with calls under `auto`, as Lark, and a
    # regular expression for the start of any answer that the parser would read as a call.
    opening: str = ""
    excluded: str = ""


def callable_tools(use: ToolUse) -> list[Tool]:
    return [tool for tool in use.tools if tool.name in use.callable]


def schema_enforced(tool: Tool, use: ToolUse) -> bool:
    """Return whether the arguments must follow the tool's schema."""
    return tool.strict or use.enforce_schemas or use.mode == "required"


def json_arguments(tool: Tool, use: ToolUse) -> str:
    """Return the Lark expression for a tool's arguments as one JSON object."""
    schema = tool.schema if schema_enforced(tool, use) else ANY_ARGUMENTS
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def json_value(schema: Any) -> str:
    """Return the Lark expression for any JSON value that follows the schema."""
    kept = schema if isinstance(schema, dict) else {}
    return "%json " + json.dumps({**kept, "x-guidance": _JSON_OPTIONS})


def alternatives(rule: str, names: Sequence[str]) -> str:
    return f"{rule}: {' | '.join(names)}"


def repeated_calls(call: str, separator: str, use: ToolUse) -> str:
    """Return the Lark expression for one or more calls, as many as the request allows."""
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if use.parallel else call
