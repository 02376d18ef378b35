"""DeepSeek V3 and R1, whose arguments stand in a code block, and V3.1, whose do not."""

from __future__ import annotations

from syringa.dialect import CALL_MARKS
from syringa.prompt.calls.marked import marked_section
from syringa.prompt.calls.section import Section
from syringa.prompt.lark import Spelling
from syringa.prompt.tools import ToolUse


def deepseek(use: ToolUse, spelling: Spelling) -> Section:
    return marked_section(use, spelling, CALL_MARKS["deepseek"], between=r'"\n"')


def deepseek_v31(use: ToolUse, spelling: Spelling) -> Section:
    return marked_section(use, spelling, CALL_MARKS["deepseek-v3.1"])
