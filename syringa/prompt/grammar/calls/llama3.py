"""Llama 3.1 and later: an answer that is nothing but `{"name": …, "parameters": {…}}`."""

from __future__ import annotations

import json

from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.objects import NAME, object_rules
from syringa.prompt.grammar.calls.section import MAX_CALLS, Section
from syringa.prompt.grammar.lark import Spelling, quoted

_TAG = "<|python_tag|>"
_BLANK = r"[ \t\r\n]*"
# Whatever `output.tools.llama3` would take for a call is one, in the one layout; other JSON stays text.
_LIKE_A_CALL = (
    rf"{_BLANK}(<\|python_tag\|>)?{_BLANK}\{{{_BLANK}"
    rf'("(name|parameters|arguments)"|"type"{_BLANK}:{_BLANK}"function")'
)


def llama3(use: ToolUse, spelling: Spelling) -> Section:
    """Several are written one after another, some models put a semicolon or a line break between them."""
    lines = object_rules(use, key="parameters", before="")
    more = rf' (("; " | "\n")? {json.dumps(NAME)} call){{0,{MAX_CALLS - 1}}}' if use.parallel else ""
    lines.append(f"section: call{more}")
    lines.append(rf"OPENING: /[ \n]*{quoted(NAME)}/")
    tag = f"{spelling.literal(_TAG)}? " if spelling.is_special(_TAG) else ""
    return Section(trigger=NAME, lines=lines, opening=f"{tag}OPENING", excluded=_LIKE_A_CALL)
