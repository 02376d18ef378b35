"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: what Hermes and Qwen write, and our own plain format."""

from __future__ import annotations

from syringa.prompt.chat.tools import BEGIN, END, ToolUse
from syringa.prompt.grammar.calls.objects import NAME, object_rules
from syringa.prompt.grammar.calls.section import Section
from syringa.prompt.grammar.lark import Spelling


def plain(use: ToolUse, spelling: Spelling) -> Section:
    """Without line breaks, which a model that was not trained on this would go on writing."""
    return _section(use, spelling, "")


def hermes(use: ToolUse, spelling: Spelling) -> Section:
    return _section(use, spelling, "\n")


def _section(use: ToolUse, spelling: Spelling, line_break: str) -> Section:
    lines = object_rules(use, before=line_break + NAME, after=line_break)
    lines.append(f"section: call {spelling.literal(END)}")
    # A line break is so much likelier than any end that, where it may go on to the next call, a model that was not
    # trained on this format calls as often as it can.
    between = r'"\n"' if spelling.is_special(BEGIN) else ""
    return Section(trigger=BEGIN, lines=lines, repeats=True, between=between)
