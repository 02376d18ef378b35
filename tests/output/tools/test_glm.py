from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import check_stage, fold, run_stage, split_text

MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
PARAMETERS: dict[str, dict[str, Any]] = {
    "book": {
        "type": "object",
        "properties": {
            "zip": {"type": "string"},
            "seats": {"type": "integer"},
            "people": {"type": "array", "items": {"$ref": "#/$defs/person"}},
        },
        "$defs": {"person": {"type": "object"}},
    }
}
# GLM 4.5 and 4.6
BOOK = """<tool_call>book
<arg_key>zip</arg_key>
<arg_value>01234</arg_value>
<arg_key>seats</arg_key>
<arg_value>2</arg_value>
<arg_key>people</arg_key>
<arg_value>[{"name": "Ana", "note": "a \\"b\\" </arg"}, {"name": "李"}]</arg_value>
</tool_call>"""
BOOKED = {"zip": "01234", "seats": 2, "people": [{"name": "Ana", "note": 'a "b" </arg'}, {"name": "李"}]}
# GLM 4.7 and 5
TIGHT = (
    "<tool_call>book<arg_key>zip</arg_key><arg_value> 9\n</arg_value>"
    "<arg_key>n</arg_key><arg_value>x</arg_value></tool_call>"
)


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (BOOK, "", [("book", BOOKED)]),
        (f"\nI book it.\n{BOOK}\n{BOOK}", "\nI book it.\n", [("book", BOOKED)] * 2),
        (TIGHT, "", [("book", {"zip": " 9\n", "n": "x"})]),
        ("<tool_call>now\n</tool_call>", "", [("now", {})]),
        ("<tool_call>now</tool_call><tool_call>\nnow </tool_call>", "", [("now", {}), ("now", {})]),
        # A repeated marker does not become part of the key.
        (TIGHT.replace("zip</arg_key>", "zip</arg_key></arg_key>"), "", [("book", {"zip": " 9\n", "n": "x"})]),
        ("Write <tool_call>name and so on.", "Write <tool_call>name and so on.", []),
    ],
)
def test_glm_parser_separates_text_and_calls(text: str, answer: str, calls: list[tuple[str, Any]]) -> None:
    _, shown, raw = fold(
        run_stage(create_tool_parser("glm", 0, PARAMETERS), split_text(text, range(len(text)), MARKERS))
    )
    assert (shown, [(name, json.loads(arguments)) for name, arguments in raw]) == (answer, calls)
    check_stage(lambda: create_tool_parser("glm", 0, PARAMETERS), text, ("", answer, raw), MARKERS)
