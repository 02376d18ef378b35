"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, in one section."""

from __future__ import annotations

import re

from syringa.output.tools.marked import MarkedCalls
from syringa.output_formats import CALL_MARKS

_HEAD = re.compile(r"(?:functions\.)?(.*?)(:\d+)?")


class KimiCalls(MarkedCalls):
    """The id is what the model wrote, because its template writes it before the function's answer."""

    marks = CALL_MARKS["kimi"]

    def _identify(self, head: str) -> tuple[str, str]:
        found = _HEAD.fullmatch(head.strip())
        name, number = found.groups() if found else ("", None)
        return name, f"functions.{name}{number or f':{self.calls}'}"
