"""Kimi K2: the name is part of the id, `functions.name:0`, in which a conversation's calls are counted."""

from __future__ import annotations

from syringa.output_formats import CALL_MARKS
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.marked import marked_section
from syringa.prompt.grammar.calls.section import Section
from syringa.prompt.grammar.lark import Spelling


def kimi(use: ToolUse, spelling: Spelling) -> Section:
    section = marked_section(use, spelling, CALL_MARKS["kimi"], before_name="functions.", after_name="NUMBER")
    section.lines.append("NUMBER: /:[0-9]{1,4}/")
    return section
