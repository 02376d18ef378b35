from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import check_stage, fold, run_stage, split_text

TOKEN = "｜DSML｜"  # a token in DeepSeek's vocabulary, inside every marker
PARAMETERS: dict[str, dict[str, Any]] = {"search": {"type": "object", "properties": {"topn": {"type": "integer"}}}}
SEARCH = f"""<{TOKEN}function_calls>
<{TOKEN}invoke name="search">
<{TOKEN}parameter name="query" string="true">latest 新闻 & "more" <br></{TOKEN}parameter>
<{TOKEN}parameter name="topn" string="false">10</{TOKEN}parameter>
<{TOKEN}parameter name="filter" string="false">{{"lang": ["en", "</{TOKEN}"], "old": false}}</{TOKEN}parameter>
</{TOKEN}invoke>
<{TOKEN}invoke name="now">

</{TOKEN}invoke>
</{TOKEN}function_calls>"""
ARGUMENTS = {"query": 'latest 新闻 & "more" <br>', "topn": 10, "filter": {"lang": ["en", f"</{TOKEN}"], "old": False}}
CALLS: list[tuple[str, Any]] = [("search", ARGUMENTS), ("now", {})]


def one(value: str) -> str:
    return (
        f'<{TOKEN}function_calls>\n<{TOKEN}invoke name="search">\n<{TOKEN}parameter name="topn" {value}'
        f"</{TOKEN}parameter>\n</{TOKEN}invoke>\n</{TOKEN}function_calls>"
    )


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (SEARCH, "", CALLS),
        (f"I look.\n\n{SEARCH}", "I look.\n\n", CALLS),
        (SEARCH.replace("\n", ""), "", CALLS),
        # The type attribute takes precedence over the schema.
        (one('string="true">10'), "", [("search", {"topn": "10"})]),
        (one('string="false">10'), "", [("search", {"topn": 10})]),
        (one('string="false">ten'), "", [("search", {"topn": "ten"})]),
        (one('string="false">"ten"'), "", [("search", {"topn": "ten"})]),
        (one(">10"), "", [("search", {"topn": 10})]),
        (f"a < b <{TOKEN} c", f"a < b <{TOKEN} c", []),
    ],
)
def test_deepseek_dsml_parser_separates_text_and_calls(text: str, answer: str, calls: list[tuple[str, Any]]) -> None:
    _, shown, raw = fold(
        run_stage(create_tool_parser("deepseek-dsml", 0, PARAMETERS), split_text(text, range(len(text)), [TOKEN]))
    )
    assert (shown, [(name, json.loads(arguments)) for name, arguments in raw]) == (answer, calls)
    check_stage(lambda: create_tool_parser("deepseek-dsml", 0, PARAMETERS), text, ("", answer, raw), [TOKEN])
