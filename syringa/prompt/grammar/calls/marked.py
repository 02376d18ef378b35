"""Calls in which marks part the name from the arguments; see `dialect.CallMarks`."""

from __future__ import annotations

from syringa.output_formats import CallMarks
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.section import Section, callable_tools, json_arguments, one_of, several
from syringa.prompt.grammar.lark import Spelling


def marked_section(
    use: ToolUse,
    spelling: Spelling,
    marks: CallMarks,
    *,
    before_name: str = "",
    after_name: str = "",
    between: str = "",
) -> Section:
    """`before_name` is text, `after_name` and what stands `between` two calls is Lark.

    Where there are marks around all calls, the first of them begins the section; else the mark of a call does.
    """
    tools = callable_tools(use)
    begin = (marks.begin if marks.section else "") + before_name
    lead = spelling.literal(marks.arguments + ("```json\n" if marks.code else ""))
    tail = ("\n```" if marks.code else "") + marks.end
    end = spelling.literal(tail) if tail else ""
    lines = [one_of("call", [f"call_{index}" for index in range(len(tools))])]
    for index, tool in enumerate(tools):
        lines.append(f"call_{index}: {spelling.literal(begin + tool.name)} {after_name} {lead} arguments_{index} {end}")
        lines.append(f"arguments_{index}: {json_arguments(tool, use)}")
    if not marks.section:
        return Section(trigger=marks.begin, lines=[*lines, "section: call"], repeats=True)
    lines.append(f"section: {several('call', between, use)} {spelling.literal(marks.section_end)}")
    return Section(trigger=marks.section, lines=lines)
