"""Tests of preparing responses: fields, tools, formats and reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.api.decoding import convert
from syringa.api.models.served_model import FixedModels
from syringa.api.responses import InputTokensRequest, prepare_count
from syringa.errors import InvalidRequest
from syringa.types import Image
from tests.api.responses.helpers import context, prepare, prompt, prompt_of, respond, run_generation, stream, to_json
from tests.chat_models import OPENING, reasoning_model, tool_model
from tests.prompt.grammar.matching import follows
from tests.schemas import validate_open_responses, validate_openai

FUNCTION = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
COLOR = {
    "type": "json_schema",
    "name": "color",
    "schema": {"type": "object", "properties": {"x": {"type": "string"}}},
}


async def test_prepare_treats_null_as_absent() -> None:
    names = [
        *("instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "conversation", "prompt"),
        *("temperature", "store", "background", "stream", "stream_options", "n", "response_format", "user", "seed"),
    ]
    assert (await respond(dict.fromkeys(names)))["status"] == "completed"


async def test_response_repeats_request_fields() -> None:
    body: dict[str, Any] = {
        "instructions": "be brief",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"k": "v"},
        "truncation": "auto",
        "parallel_tool_calls": False,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "prompt_cache_key": "key",
        "safety_identifier": "who",
        "user": "me",
        "store": False,
        "tool_choice": {"type": "function", "name": "add"},
        "previous_response_id": "resp_1",
    }
    response = await respond(body | {"tools": [FUNCTION]}, model=tool_model())
    assert {name: response[name] for name in body} == body
    assert response["tools"] == [FUNCTION | {"strict": True}]
    assert (response["model"], response["object"]) == ("fake", "response")


async def test_prepare_sets_user_and_tenant() -> None:
    call = await prepare({"safety_identifier": "who"})
    assert (call.request.user, call.request.tenant) == ("who", "org")
    assert call.request.id == call.writer.id


async def test_response_repeats_conversation_as_object() -> None:
    for given in ("conv_1", {"id": "conv_1"}):
        assert (await respond({"conversation": given}))["conversation"] == {"id": "conv_1"}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"service_tier": "flex"}, ["service_tier"]),
        ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ({"reasoning": {"summary": "auto"}}, ["reasoning.summary"]),
        ({"reasoning": {"generate_summary": "auto"}}, ["reasoning.generate_summary"]),
        ({"reasoning": {"effort": "low", "mode": "pro"}}, ["reasoning.mode", "reasoning.effort"]),
        ({"include": ["web_search_call.results"]}, ["include[0]"]),
        ({"include": ["message.input_image.image_url"]}, []),
        ({"prompt_cache_retention": "24h"}, ["prompt_cache_retention"]),
        ({"input": [{"role": "user", "content": "x", "color": 1}]}, ["input[0].color"]),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, ["tools[0].defer_loading"]),
        ({"color": 1}, ["color"]),
        ({"thinking_token_budget": 5}, ["thinking_token_budget"]),
    ],
)
async def test_prepare_reports_ignored_fields(body: dict[str, Any], names: list[str]) -> None:
    ignored: list[str] = []
    await prepare(body, ignored=ignored)
    assert ignored == names


async def test_prepare_enforces_and_repeats_text_format() -> None:
    ignored: list[str] = []
    call = await prepare({"text": {"format": COLOR}}, ignored=ignored)
    assert call.request.sampling.grammar is not None
    assert follows(call.request.sampling.grammar, '{"x":"red"}')
    response = to_json(call.writer.response)
    assert response["text"] == {"format": COLOR | {"strict": False}, "verbosity": "medium"}
    validate_openai(response, "Response")
    assert ignored == []
    response = await respond({"text": {"format": {"type": "json_object"}}})
    assert response["text"]["format"] == {"type": "json_object"}


async def test_open_mode_has_null_schema_in_text_format() -> None:
    events = await stream({"text": {"format": COLOR | {"description": "A color."}}}, open_mode=True)
    echo = events[-1]["response"]["text"]["format"]
    assert (echo["schema"], echo["description"]) == (None, "A color.")


async def test_text_format_does_not_constrain_reasoning() -> None:
    call = await prepare({"text": {"format": COLOR}}, model=reasoning_model())
    grammar = call.request.sampling.grammar
    assert grammar is not None
    assert "reasoning" in grammar.value


async def test_prepare_accepts_grammar_and_stop() -> None:
    call = await prepare({"grammar": {"type": "regex", "value": "a+"}, "stop": ["x"], "min_tokens": 2, "seed": 5})
    assert call.request.sampling.grammar is not None
    assert (call.request.stop, call.request.stopping.min_tokens, call.request.sampling.seed) == (("x",), 2, 5)


async def test_effort_none_turns_reasoning_off() -> None:
    body = {"reasoning": {"effort": "none"}}
    call = await prepare(body, model=reasoning_model())
    assert prompt_of(call).endswith("<think></think>")
    assert to_json(call.writer.response)["reasoning"] == {"effort": "none", "summary": None}
    assert (await prompt({"chat_template_kwargs": {"thinking": False}}, model=reasoning_model())).endswith("</think>")


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
async def test_effort_reaches_the_template(effort: str) -> None:
    body = {"reasoning": {"effort": effort}}
    assert f"[effort {effort}]" in await prompt(body, model=reasoning_model(OPENING))
    call = await prepare(body, model=reasoning_model(OPENING))
    validate_openai(to_json(call.writer.response), "Response")


@pytest.mark.parametrize(
    ("tool", "strict"),
    [
        (FUNCTION, True),
        (FUNCTION | {"strict": False}, False),
        (FUNCTION | {"parameters": {"type": "object", "not": {}}}, False),
        ({"type": "function", "name": "add"}, True),
    ],
)
async def test_functions_are_strict_if_enforceable(tool: dict[str, Any], strict: bool) -> None:
    response = await respond({"tools": [tool]}, model=tool_model())
    assert response["tools"][0]["strict"] is strict


@pytest.mark.parametrize(
    ("choice", "may", "may_not"),
    [
        ("auto", ["text", "add", "sql"], []),
        ("required", ["add", "sql"], ["text"]),
        ({"type": "function", "name": "add"}, ["add"], ["text", "sql"]),
        ({"type": "custom", "name": "sql"}, ["sql"], ["text", "add"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "sql"}]},
            ["sql"],
            ["text", "add"],
        ),
    ],
)
async def test_response_tool_choice(choice: Any, may: list[str], may_not: list[str]) -> None:
    texts = {"text": "hello", "add": _call("add", {"a": 1}), "sql": _call("sql", {"input": "select"})}
    body = {"tools": [FUNCTION, {"type": "custom", "name": "sql"}], "tool_choice": choice}
    call = await prepare(body, model=tool_model())
    grammar = call.request.sampling.grammar
    assert grammar is not None
    assert [name for name, text in texts.items() if follows(grammar, text)] == [n for n in texts if n in may]
    assert not any(follows(grammar, texts[name]) for name in may_not)
    assert to_json(call.writer.response)["tool_choice"] == choice
    validate_openai(to_json(call.writer.response), "Response")


async def test_tool_choice_none_hides_tools() -> None:
    call = await prepare({"tools": [FUNCTION], "tool_choice": "none"}, model=tool_model())
    assert call.request.output.tool_calls is None
    assert "[tools]" not in prompt_of(call)
    assert to_json(call.writer.response)["tools"]


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "fits", "does_not"),
    [
        ({"type": "text"}, 'any "thing"\n', None),
        ({"type": "grammar", "syntax": "regex", "definition": '[a-z]+/"[0-9]{2}'}, 'ab/"12', "ab"),
        ({"type": "grammar", "syntax": "regex", "definition": "^ab$"}, "ab", "b"),
        ({"type": "grammar", "syntax": "lark", "definition": 'start: "x" start | "\\n"'}, "xxx\n", "xx"),
    ],
)
async def test_custom_tools_are_constrained_by_their_grammar(
    form: dict[str, Any], fits: str, does_not: str | None
) -> None:
    tool = {"type": "custom", "name": "sql", "description": "Queries.", "format": form}
    call = await prepare({"tools": [tool], "tool_choice": "required"}, model=tool_model())
    grammar = call.request.sampling.grammar
    assert grammar is not None
    assert follows(grammar, _call("sql", {"input": fits}))
    assert does_not is None or not follows(grammar, _call("sql", {"input": does_not}))
    response = to_json(call.writer.response)
    assert response["tools"] == [tool]
    validate_openai(response, "Response")
    prompt_text = prompt_of(call)
    assert json.dumps(form.get("definition", "Queries."))[1:-1] in prompt_text
    assert "pattern" not in prompt_text
    events = await run_generation(call, _call("sql", {"input": fits}))
    for event in events:
        call.writer.write(event)
    assert call.writer.output[0]["input"] == fits


async def test_open_mode_response_matches_both_schemas() -> None:
    body = {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "add"}]}}  # fmt: skip
    events = await stream(body, _call("add", {"a": 1}), model=tool_model(), request_context=context(open_mode=True))
    validate_open_responses(events[-1]["response"])
    validate_openai(events[-1]["response"], "Response")


async def no_images(model: str, prompt: list[int], images: tuple[Image, ...]) -> int:
    raise AssertionError("the engine is asked about a prompt without images")


async def count_tokens(body: dict[str, Any], ignored: list[str] | None = None) -> dict[str, Any]:
    names = [] if ignored is None else ignored
    models = FixedModels([tool_model()])
    prepared = await prepare_count(convert(body, InputTokensRequest), models, names, context())
    return await prepared.count_tokens(no_images)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": [{"role": "user", "content": "x"}], "instructions": "be brief"},
        {"input": "hello", "tools": [FUNCTION], "tool_choice": "required"},
        {"input": "hello", "tools": [FUNCTION], "tool_choice": "none"},
        {"input": "hello", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_counted_input_tokens_equal_the_prompt_of_the_response(body: dict[str, Any]) -> None:
    count = await count_tokens(body)
    validate_openai(count, "TokenCountsResource")
    call = await prepare(body, model=tool_model())
    assert count["input_tokens"] == len(call.request.prompts[0])


async def test_counting_input_tokens_rejects_and_reports_fields() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await count_tokens({"input": "x", "conversation": "c", "previous_response_id": "r"})
    assert caught.value.param == "previous_response_id"
    ignored: list[str] = []
    await count_tokens({"input": "x", "personality": "friendly"}, ignored)
    assert ignored == ["personality"]
