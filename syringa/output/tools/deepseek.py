"""DeepSeek V3 and R1, whose arguments stand in a code block, and V3.1, whose do not. All calls stand in one section."""

from __future__ import annotations

from syringa.output.tools.marked import MarkedCalls
from syringa.output_formats import CALL_MARKS

_PARTS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")


class DeepseekCalls(MarkedCalls):
    marks = CALL_MARKS["deepseek"]
    name_ends = ("\n", "```", "{")
    other_marks = _PARTS  # of which the mark before a name is made


class DeepseekV31Calls(MarkedCalls):
    marks = CALL_MARKS["deepseek-v3.1"]
