"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}` per call."""

from __future__ import annotations

from syringa.output_formats import CALL_MARKS
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.marked import marked_section
from syringa.prompt.grammar.calls.objects import object_rules
from syringa.prompt.grammar.calls.section import Section, several
from syringa.prompt.grammar.lark import Spelling


def mistral(use: ToolUse, spelling: Spelling) -> Section:
    """Vocabularies of SentencePiece write a space before the list, later ones do not."""
    calls = several("call", '", "', use)
    return Section(trigger="[TOOL_CALLS]", lines=[*object_rules(use), f'section: " "? "[" {calls} "]"'])


def mistral_args(use: ToolUse, spelling: Spelling) -> Section:
    """Some models put the id of the call before its arguments."""
    section = marked_section(use, spelling, CALL_MARKS["mistral-args"], after_name="id")
    section.lines.append(f"id: ({spelling.literal('[CALL_ID]')} ID)?")
    section.lines.append("ID: /[a-zA-Z0-9]{9}/")
    return section
