"""Invalid requests for responses, and the published schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from syringa.http.endpoints import openapi_document
from tests.api.responses.helpers import context, refused
from tests.fake_engine import fake_model

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "x"}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [USER, *given]}


def custom(**form: Any) -> dict[str, Any]:
    return {"tools": [{"type": "custom", "name": "c", "format": form}]}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"input": 1}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": ["x"]}, "input[0]"),
    (items({"type": "web_search_call", "id": "ws_1"}), "input[1].type"),
    (items({"type": 3}), "input[1].type"),
    (items({}), "input[1].type"),
    (items({"role": "tool", "content": "x"}), "input[1].role"),
    (items({"role": "user"}), "input[1].content"),
    (items({"role": "user", "content": []}), "input[1].content"),
    (items({"role": "user", "content": 3}), "input[1].content"),
    (items({"role": "user", "content": ["x"]}), "input[1].content[0]"),
    (items({"role": "user", "content": [{"type": "input_text"}]}), "input[1].content[0]"),
    (items({"role": "user", "content": [{"type": "input_file"}]}), "input[1].content[0].type"),
    (items({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}), "input[1].content[0].type"),
    (items({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}), "input[1].content[0].file_id"),
    (items({"role": "user", "content": [{"type": "input_image"}]}), "input[1].content[0].image_url"),
    (
        items({"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}),
        "input[1].content[0].image_url",
    ),
    (items({"role": "system", "content": [{"type": "input_image"}]}), "input[1].content[0].type"),
    (items({"role": "user", "content": "x", "phase": "commentary"}), "input[1].phase"),
    (items({"role": "assistant", "content": "x", "phase": "other"}), "input[1].phase"),
    (items({"role": "user", "content": "x", "status": "odd"}), "input[1].status"),
    (items({"role": "user", "content": "x", "id": ""}), "input[1].id"),
    (items({"role": "user", "content": "x", "id": "a"}, {"role": "user", "content": "x", "id": "a"}), "input[2].id"),
    (items({"type": "function_call", "call_id": "c", "name": "f"}), "input[1]"),
    (items({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}), "input[1].arguments"),
    (items({"type": "function_call", "call_id": "c", "name": "f", "arguments": "3"}), "input[1].arguments"),
    (items({"type": "function_call_output", "call_id": "c", "output": "x"}), "input[1].call_id"),
    (items({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}), "input[1].call_id"),
    (items({"type": "function_call_output", "call_id": "c"}), "input[1].output"),
    (
        items({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}),
        "input[1].output[0].type",
    ),
    (items({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 3}), "input[1].input"),
    (items({"type": "reasoning", "summary": "x"}), "input[1].summary"),
    (items({"type": "reasoning", "content": [{"type": "text", "text": "x"}]}), "input[1].content[0].type"),
    (items({"type": "compaction", "encrypted_content": "x"}), "input[1].encrypted_content"),
    (items({"type": "compaction"}), "input[1]"),
    (items({"type": "item_reference", "id": "msg_x"}), "input[1].id"),
    (items({"type": "item_reference"}), "input[1].id"),
    ({"model": "other"}, "model"),
    ({"previous_response_id": "r", "conversation": "c"}, "previous_response_id"),
    ({"conversation": {}}, "conversation"),
    ({"conversation": 3}, "conversation"),
    ({"background": True, "store": False}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"metadata": {"k": 1}}, "metadata.k"),
    ({"metadata": {str(each): "v" for each in range(17)}}, "metadata"),
    ({"include": ["other"]}, "include[0]"),
    ({"include": "x"}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "some"}, "truncation"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "none"}, "chat_template_kwargs": {"thinking": True}}, "reasoning.effort"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": 3}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"not": {}}}}},
        "text.format.schema.not",
    ),
    ({"text": {"format": {"type": "json_object"}}, "grammar": {"type": "regex", "value": "a"}}, "grammar"),
    ({"tools": [TOOL], "grammar": {"type": "regex", "value": "a"}}, "grammar"),
    ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"tools": [TOOL | {"strict": True, "parameters": {"not": {}}}]}, "tools[0].parameters.not"),
    (custom(type="other"), "tools[0].format.type"),
    (custom(type="grammar", syntax="regex"), "tools[0].format.definition"),
    (custom(type="grammar", definition="x"), "tools[0].format.syntax"),
    (custom(type="grammar", syntax="regex", definition="["), "tools[0].format.definition"),
    (custom(type="grammar", syntax="regex", definition="(?=a)b"), "tools[0].format.definition"),
    (custom(type="grammar", syntax="lark", definition="begin: x"), "tools[0].format.definition"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web"}]}},
        "tool_choice.tools[0].type",
    ),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"moderation": {}}, "moderation"),
    ({"context_management": []}, "context_management"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"temperature": 3}, "temperature"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"logit_bias": {"999": 1}}, "logit_bias.999"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"safety_identifier": "x" * 65}, "safety_identifier"),
]


@pytest.mark.parametrize(("body", "param"), INVALID, ids=lambda value: str(value)[:70])
async def test_responses_reject_invalid_field(body: dict[str, Any], param: str) -> None:
    error = await refused(body)
    assert error.status in (400, 404)
    assert error.param == param
    assert error.message


# What the published schema cannot say: rules between fields and items, the model, JSON or a grammar inside of a string.
BEYOND_SCHEMA = (
    *("model", "previous_response_id", "background", "max_output_tokens", "reasoning.effort", "grammar", "logit_bias"),
    *("tools", "tool_choice", "stream_options", "text.format.schema.not", "input[1].arguments", "input[1].call_id"),
    *("input[1].encrypted_content", "input[1].id", "input[2].id", "input[1].content[0].image_url"),
)


@pytest.mark.parametrize(("body", "param"), INVALID, ids=lambda value: str(value)[:70])
def test_responses_schema_rejects_what_the_server_rejects(body: dict[str, Any], param: str) -> None:
    schema = {
        "$ref": "#/components/schemas/ResponseRequest",
        "components": openapi_document(secured=False)["components"],
    }
    found = list(jsonschema.Draft202012Validator(schema).iter_errors(body))
    assert found or param.startswith(BEYOND_SCHEMA) or not body.get("input", True)


async def test_responses_name_supported_items() -> None:
    error = await refused({"input": [{"type": "shell_call"}]})
    assert "function_call_output" in error.message
    assert "shell_call" in error.message


async def test_responses_need_a_chat_template() -> None:
    error = await refused({}, model=fake_model())
    assert error.param == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom", "name": "c"}]}, "tools[0].type"),
        ({"reasoning": {"effort": "minimal"}}, "reasoning.effort"),
    ],
)
async def test_open_mode_rejects_unsupported_values(body: dict[str, Any], param: str) -> None:
    assert (await refused(body, request_context=context(open_mode=True))).param == param
