from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import check_stage, fold, run_stage, split_text

MARKERS = ("<minimax:tool_call>", "</minimax:tool_call>")
PARAMETERS: dict[str, dict[str, Any]] = {
    "search_web": {
        "type": "object",
        "properties": {
            "query_tag": {"type": "array", "items": {"type": "string"}},
            "query_list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "site": {"type": ["string", "null"]},
        },
    }
}
WEB = """<minimax:tool_call>
<invoke name="search_web">
<parameter name="query_tag">["technology", "events"]</parameter>
<parameter name="query_list">null</parameter>
<parameter name="site">openai.com/"x"</parameter>
</invoke>
<invoke name="search_web">
<parameter name="site">null</parameter>
</invoke>
</minimax:tool_call>"""
CALLS = [
    ("search_web", {"query_tag": ["technology", "events"], "query_list": None, "site": 'openai.com/"x"'}),
    ("search_web", {"site": None}),
]


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (WEB, "", CALLS),
        (f"I search.\n{WEB}\n", "I search.\n", CALLS),
        (WEB.replace("\n", ""), "", CALLS),
        (f"{WEB}\n{WEB} Done.", "", CALLS * 2),
        (WEB.replace("</invoke>\n<invoke", "</invoke>\nAnd:\n<invoke"), "", CALLS[:1]),
        ('<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', "", [("now", {})]),
    ],
)
def test_minimax_parser_separates_text_and_calls(text: str, answer: str, calls: list[tuple[str, Any]]) -> None:
    _, shown, raw = fold(
        run_stage(create_tool_parser("minimax", 0, PARAMETERS), split_text(text, range(len(text)), MARKERS))
    )
    assert (shown, [(name, json.loads(arguments)) for name, arguments in raw]) == (answer, calls)
    check_stage(lambda: create_tool_parser("minimax", 0, PARAMETERS), text, ("", answer, raw), MARKERS)
