"""DeepSeek V3 and R1, whose arguments stand in a code block, and V3.1, whose do not."""

from __future__ import annotations

from syringa.output_formats import CALL_MARKS
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.marked import marked_section
from syringa.prompt.grammar.calls.section import Section
from syringa.prompt.grammar.lark import Spelling


def deepseek(use: ToolUse, spelling: Spelling) -> Section:
    return marked_section(use, spelling, CALL_MARKS["deepseek"], between=r'"\n"')


def deepseek_v31(use: ToolUse, spelling: Spelling) -> Section:
    return marked_section(use, spelling, CALL_MARKS["deepseek-v3.1"])
