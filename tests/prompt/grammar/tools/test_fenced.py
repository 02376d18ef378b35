"""Grammar of calls in a Markdown code block: it constrains whatever the parser reads as such a call."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from syringa.output.detokenizer import TextSegment
from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import TOOL_CALL_BEGIN, TOOL_CALL_FORMATS, ToolCallFormat
from syringa.prompt.chat.tools import Tool, close_schema
from tests.output.segments import fold, run_stage
from tests.output.tools.test_fenced_calls import ORDINARY
from tests.prompt.grammar.matching import SCHEMA, STRICT, TIME, byte_tokenizer, call_grammar, follows, use
from tests.prompt.grammar.tools.unquoted_formats import draw

FORMATS = [format for format in TOOL_CALL_FORMATS if format != "harmony"]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "time", "parameters": {}}'


def block(*lines: str) -> str:
    return "\n".join(("```json", *lines, "```"))


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")], ids=["spelled", "special"])
@pytest.mark.parametrize("format", FORMATS)
def test_auto_mode_constrains_calls_in_code_blocks(format: ToolCallFormat, special: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer(*special)
    grammar = call_grammar(use("auto", STRICT, TIME), format, tokenizer)
    for text in (
        block(ROME),
        f"Sure:\n\n{block(ROME)}\n",
        block('{\n  "name": "weather",\n  "arguments": {"city": "Rome", "days": 2}\n}'),
        f"{block(ROME)}\n{block(NOW)}",
        block(ROME, NOW),
        block(f"[{ROME},", f"{NOW}]"),
        f"{block(json.dumps({'name': 'Bob'}))}\n{block(ROME)}",
        block('{"name": "weather", "description": "x"}') + block(NOW),
    ):
        assert follows(grammar, text, tokenizer), text
    for text in (
        block('{"name": "weather", "arguments": {"town": "Rome"}}'),
        block('{"name": "weather", "arguments": {"city": "Rome", "days": 12}}'),
        block('{"name": "weather", "arguments": "Rome"}'),
        block('{"name": "weather", "arguments": {"city": "Rome"}, "id": 5}'),
        block(ROME)[:-1],
        block(ROME, '{"name": "weather", "arguments": {}}'),
        f"Well:\n{block(json.dumps({'name': 'Bob'}))}\n{block(json.dumps({'name': 'weather', 'arguments': {}}))}",
    ):
        assert not follows(grammar, text, tokenizer), text


@pytest.mark.parametrize("format", FORMATS)
def test_auto_mode_leaves_other_code_blocks_free(format: ToolCallFormat) -> None:
    grammar = call_grammar(use("auto", Tool(name="f"), Tool(name="get_weather"), names="f get_weather"), format)
    for text in ORDINARY:
        if '"arguments": "none"' not in text:  # the parser takes it for text, but a constrained model writes an object
            assert follows(grammar, text), text
            assert follows(grammar, f"See:\n{text}\nand {text}."), text


def test_single_call_is_enforced_in_code_blocks() -> None:
    one = call_grammar(use("auto", names="time", parallel=False), "hermes")
    assert follows(one, block(NOW))
    assert not follows(one, block(NOW, NOW))
    assert not follows(one, block(NOW) + block(NOW))
    assert follows(one, block(ROME))  # not a call: the tool is not among those that may be called


def test_required_mode_has_no_code_blocks() -> None:
    assert not follows(call_grammar(use("required"), "hermes"), block(NOW))


def test_many_tools_with_long_names_can_be_constrained() -> None:
    names = [f"{index:03}{'n' * 61}" for index in range(128)]
    tools = [Tool(name=name, parameters=SCHEMA, schema=close_schema(SCHEMA), strict=True) for name in names]
    grammar = call_grammar(use("auto", *tools, names=" ".join(names)), "hermes")
    assert follows(grammar, "Well: " + block(ROME.replace("weather", names[77])))
    assert not follows(grammar, block(json.dumps({"name": names[77], "arguments": {}})))


@pytest.mark.parametrize("format", ["hermes", "llama3", "qwen-coder", "gemma"])
def test_parsed_arguments_of_sampled_calls_in_code_blocks_follow_the_schema(format: ToolCallFormat) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = Tool(name="f", parameters=schema, schema=schema, strict=True)
    tokenizer = byte_tokenizer()
    grammar = call_grammar(use("auto", tool, names="f"), format, tokenizer)
    endings = ['```json\n{"name": "f", "arguments": '] * 4 + ["```json", '{"city": "', '"}', "}\n```", TOOL_CALL_BEGIN]
    found = 0
    for seed in range(100):
        text = draw(grammar, tokenizer, seed, endings)
        if text is None:
            continue
        _, _, calls = fold(run_stage(create_tool_parser(format, 0, {"f": schema}), [TextSegment(text)]))
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), schema)
        found += len(calls)
    assert found >= 3
