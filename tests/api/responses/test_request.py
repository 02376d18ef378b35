from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.responses.responding import context, plain, prepared, prompt, prompt_of, ran, respond, stream
from tests.chat_models import OPENING, thinking_model, tool_model
from tests.prompt.grammar.matching import follows
from tests.schemas import validate, validate_open

FUNCTION = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
COLOUR = {
    "type": "json_schema",
    "name": "colour",
    "schema": {"type": "object", "properties": {"x": {"type": "string"}}},
}


async def test_null_is_absent() -> None:
    names = [
        *("instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "conversation", "prompt"),
        *("temperature", "store", "background", "stream", "stream_options", "n", "response_format", "user", "seed"),
    ]
    assert (await respond(dict.fromkeys(names)))["status"] == "completed"


async def test_what_was_asked_is_repeated() -> None:
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


async def test_the_request_has_the_names_that_usage_is_kept_under() -> None:
    call = await prepared({"safety_identifier": "who"})
    assert (call.request.user, call.request.tenant) == ("who", "org")
    assert call.request.id == call.writer.id


async def test_a_conversation_is_repeated_as_an_object() -> None:
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
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, ["input[0].colour"]),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, ["tools[0].defer_loading"]),
        ({"colour": 1}, ["colour"]),
        ({"thinking_token_budget": 5}, ["thinking_token_budget"]),
    ],
)
async def test_what_is_not_heeded_is_named(body: dict[str, Any], names: list[str]) -> None:
    ignored: list[str] = []
    await prepared(body, ignored=ignored)
    assert ignored == names


async def test_formats_are_held_and_repeated() -> None:
    ignored: list[str] = []
    call = await prepared({"text": {"format": COLOUR}}, ignored=ignored)
    assert call.request.sampling.grammar is not None
    assert follows(call.request.sampling.grammar, '{"x":"red"}')
    response = plain(call.writer.response)
    assert response["text"] == {"format": COLOUR | {"strict": False}, "verbosity": "medium"}
    validate(response, "Response")
    assert ignored == []
    response = await respond({"text": {"format": {"type": "json_object"}}})
    assert response["text"]["format"] == {"type": "json_object"}


async def test_open_responses_knows_no_schema_in_a_format() -> None:
    events = await stream({"text": {"format": COLOUR | {"description": "A colour."}}}, open_mode=True)
    echo = events[-1]["response"]["text"]["format"]
    assert (echo["schema"], echo["description"]) == (None, "A colour.")


async def test_a_thought_stays_free_before_a_format() -> None:
    call = await prepared({"text": {"format": COLOUR}}, model=thinking_model())
    grammar = call.request.sampling.grammar
    assert grammar is not None
    assert "thought" in grammar.value


async def test_grammar_and_stop_are_extras() -> None:
    call = await prepared({"grammar": {"type": "regex", "value": "a+"}, "stop": ["x"], "min_tokens": 2, "seed": 5})
    assert call.request.sampling.grammar is not None
    assert (call.request.stop, call.request.stopping.min_tokens, call.request.sampling.seed) == (("x",), 2, 5)


async def test_no_effort_is_no_thought() -> None:
    body = {"reasoning": {"effort": "none"}}
    call = await prepared(body, model=thinking_model())
    assert prompt_of(call).endswith("<think></think>")
    assert plain(call.writer.response)["reasoning"] == {"effort": "none", "summary": None}
    assert (await prompt({"chat_template_kwargs": {"thinking": False}}, model=thinking_model())).endswith("</think>")


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
async def test_an_effort_reaches_the_template(effort: str) -> None:
    body = {"reasoning": {"effort": effort}}
    assert f"[effort {effort}]" in await prompt(body, model=thinking_model(OPENING))
    call = await prepared(body, model=thinking_model(OPENING))
    validate(plain(call.writer.response), "Response")


@pytest.mark.parametrize(
    ("tool", "strict"),
    [
        (FUNCTION, True),
        (FUNCTION | {"strict": False}, False),
        (FUNCTION | {"parameters": {"type": "object", "not": {}}}, False),
        ({"type": "function", "name": "add"}, True),
    ],
)
async def test_functions_are_strict_where_they_can_be(tool: dict[str, Any], strict: bool) -> None:
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
async def test_tool_choice(choice: Any, may: list[str], may_not: list[str]) -> None:
    texts = {"text": "hello", "add": _call("add", {"a": 1}), "sql": _call("sql", {"input": "select"})}
    body = {"tools": [FUNCTION, {"type": "custom", "name": "sql"}], "tool_choice": choice}
    call = await prepared(body, model=tool_model())
    grammar = call.request.sampling.grammar
    assert grammar is not None
    assert [name for name, text in texts.items() if follows(grammar, text)] == [n for n in texts if n in may]
    assert not any(follows(grammar, texts[name]) for name in may_not)
    assert plain(call.writer.response)["tool_choice"] == choice
    validate(plain(call.writer.response), "Response")


async def test_no_choice_is_no_tools() -> None:
    call = await prepared({"tools": [FUNCTION], "tool_choice": "none"}, model=tool_model())
    assert call.request.output.calls is None
    assert "[tools]" not in prompt_of(call)
    assert plain(call.writer.response)["tools"]


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
async def test_custom_tools_are_held_to_their_grammar(form: dict[str, Any], fits: str, does_not: str | None) -> None:
    tool = {"type": "custom", "name": "sql", "description": "Queries.", "format": form}
    call = await prepared({"tools": [tool], "tool_choice": "required"}, model=tool_model())
    grammar = call.request.sampling.grammar
    assert grammar is not None
    assert follows(grammar, _call("sql", {"input": fits}))
    assert does_not is None or not follows(grammar, _call("sql", {"input": does_not}))
    response = plain(call.writer.response)
    assert response["tools"] == [tool]
    validate(response, "Response")
    told = prompt_of(call)
    assert json.dumps(form.get("definition", "Queries."))[1:-1] in told
    assert "pattern" not in told
    events = await ran(call, _call("sql", {"input": fits}))
    for event in events:
        call.writer.write(event)
    assert call.writer.output[0]["input"] == fits


async def test_open_mode_and_both_schemas_for_functions() -> None:
    body = {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "add"}]}}  # fmt: skip
    events = await stream(body, _call("add", {"a": 1}), model=tool_model(), around=context(open_mode=True))
    validate_open(events[-1]["response"])
    validate(events[-1]["response"], "Response")
