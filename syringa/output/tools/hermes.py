"""Calls as Hermes, Qwen and our own plain format write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from syringa.output.tools.objects import ObjectCalls, ObjectFormat


class HermesCalls(ObjectCalls):
    format = ObjectFormat(begin="<tool_call>", end="</tool_call>")
