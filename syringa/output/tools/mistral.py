"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call.

Their templates refuse the ids of calls unless they are nine letters and digits.
"""

from __future__ import annotations

import re
import secrets
import string

from syringa.output.tools.call import CallReader
from syringa.output.tools.marked import MarkedCalls
from syringa.output.tools.objects import ObjectCalls, ObjectFormat
from syringa.output_formats import CALL_MARKS

_ID = re.compile("[a-zA-Z0-9]{9}")
_CHARACTERS = string.ascii_letters + string.digits
_CALL_ID = "[CALL_ID]"


class MistralCalls(ObjectCalls):
    """A model's own id is kept if it comes before the name: when a call is told of, it has to have one."""

    format = ObjectFormat(begin="[TOOL_CALLS]", opening="[", separator=",", end="]")

    def _new_id(self, reader: CallReader) -> str:
        return _nine(reader.id)


class MistralArgsCalls(MarkedCalls):
    """`[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, with or without the id; some leave out `[ARGS]` too."""

    marks = CALL_MARKS["mistral-args"]
    name_ends = ("[ARGS]", "{")
    other_marks = (_CALL_ID,)

    def _identify(self, head: str) -> tuple[str, str]:
        name, _, id = head.partition(_CALL_ID)
        return name.strip(), _nine(id.strip())


def _nine(id: str | None) -> str:
    if id is not None and _ID.fullmatch(id):
        return id
    return "".join(secrets.choice(_CHARACTERS) for _ in range(9))
