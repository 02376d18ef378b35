from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.output.tools.formats import create_tool_parser
from tests.output.segments import check_stage, fold, run_stage, split_text

MARKERS = ("<tool_call>", "</tool_call>")
PARAMETERS: dict[str, dict[str, Any]] = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}},
    },
    "search": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "globs": {"type": "array", "items": {"type": "string"}}},
    },
    "toggle": {"type": "object", "properties": {"on": {"type": "boolean"}}},
}
WRITE = """<tool_call>
<function=write_file>
<parameter=path>
src/hello.py
</parameter>
<parameter=content>
def hello(name):
    if name < "m":
        print(f"<b>{name}</b>\\n")

</parameter>
<parameter=mode>
420
</parameter>
</function>
</tool_call>"""
CONTENT = 'def hello(name):\n    if name < "m":\n        print(f"<b>{name}</b>\\n")\n'
SEARCH = """<tool_call>
<function=search>
<parameter=query>
TODO
</parameter>
<parameter=globs>
["*.py", "docs/**"]
</parameter>
</function>
</tool_call>"""
WRITTEN = ("write_file", {"path": "src/hello.py", "content": CONTENT, "mode": 420})
SEARCHED = ("search", {"query": "TODO", "globs": ["*.py", "docs/**"]})


def outputs(text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = create_tool_parser("qwen-coder", 0, PARAMETERS)
    _, answer, calls = fold(run_stage(parser, split_text(text, range(0, len(text), 4), MARKERS)))
    return answer, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (WRITE, "", [WRITTEN]),
        (f"I write the file.\n\n{WRITE}", "I write the file.\n\n", [WRITTEN]),
        (f"{SEARCH}\n{WRITE}\n", "", [SEARCHED, WRITTEN]),
        # The template of Qwen3.5 prints Python literals.
        (
            "<tool_call>\n<function=toggle>\n<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>",
            "",
            [("toggle", {"on": True})],
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
        # Without line breaks and the last marker.
        ("<tool_call><function=search><parameter=query>a</parameter></function>", "", [("search", {"query": "a"})]),
        (
            "<tool_call>\n<function=now>\n</function>\nIt is late.",
            "",
            [("now", {})],
        ),
    ],
)
def test_qwen_coder_parser_separates_text_and_calls(text: str, answer: str, calls: list[tuple[str, Any]]) -> None:
    assert outputs(text) == (answer, calls)
    _, _, raw = fold(run_stage(create_tool_parser("qwen-coder", 0, PARAMETERS), split_text(text)))
    check_stage(lambda: create_tool_parser("qwen-coder", 0, PARAMETERS), text, ("", answer, raw), MARKERS)


def test_qwen_coder_parser_does_not_read_hermes_calls() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert outputs(text) == (text, [])
