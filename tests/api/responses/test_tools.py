"""Tests of the tools of responses: namespaces, tool search, added tools, and tools that only OpenAI hosts."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from syringa.api.fields.hosted_tools import HOSTED_TOOLS
from syringa.output_formats import ModelFormats, ToolCallFormat
from syringa.prompt.chat.template import ChatTemplate
from tests.api.responses.helpers import (
    context,
    event_types,
    prepare,
    prompt_of,
    refused,
    respond,
    run_generation,
    stream,
    to_json,
    write_events,
)
from tests.chat_models import TOOLS, plain_model, tool_model
from tests.fake_engine import fake_model
from tests.prompt.grammar.matching import byte_tokenizer, follows
from tests.prompt.grammar.tools.unquoted_formats import draw
from tests.schemas import validate_open_responses, validate_openai

AMOUNT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": AMOUNT}
QUERY = {"type": "custom", "name": "query", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
WEB = {"type": "web_search"}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": AMOUNT}


def namespace(name: str, *tools: dict[str, Any], description: str = "About it.") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": description, "tools": list(tools)}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def allowed(body: dict[str, Any], *texts: str, **kwargs: Any) -> list[str]:
    """Return which of the texts the grammar of a request allows."""
    call = await prepare(body, model=tool_model(), **kwargs)
    grammar = call.request.sampling.grammar
    assert grammar is not None
    return [text for text in texts if follows(grammar, text)]


async def test_namespaces_may_have_tools_of_the_same_name() -> None:
    body = {"tools": [ADD, namespace("crm", ADD, QUERY), namespace("erp", ADD)], "tool_choice": "required"}
    valid = [call_text(name, {"a": 1}) for name in ("add", "crm.add", "erp.add")]
    valid.append(call_text("crm.query", {"input": "abc"}))
    invalid = [
        call_text("crm.add", {"a": "x"}),
        call_text("erp.query", {"input": "abc"}),
        call_text("crm.query", {"input": "1"}),
        call_text("query", {"input": "abc"}),
    ]
    assert await allowed(body, *valid, *invalid) == valid


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("add", {"a": 1}, {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}),
        ("erp.add", {"a": 1}, {"type": "function_call", "name": "add", "namespace": "erp", "arguments": '{"a": 1}'}),
        (
            "crm.query",
            {"input": "abc"},
            {"type": "custom_tool_call", "name": "query", "namespace": "crm", "input": "abc"},
        ),
    ],
)
async def test_calls_carry_their_namespace(name: str, arguments: dict[str, Any], item: dict[str, Any]) -> None:
    tools = [ADD, namespace("crm", QUERY), namespace("erp", ADD)]
    events = await stream({"tools": tools}, call_text(name, arguments), model=tool_model())
    validate_openai(events[-1]["response"], "Response")
    (output,) = events[-1]["response"]["output"]
    assert {key: value for key, value in output.items() if key not in ("id", "call_id", "status")} == item
    carried = [event["item"].get("namespace") for event in events if "item" in event]
    assert carried == [item.get("namespace")] * 2
    done = [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == ([item["name"]] if item["type"] == "function_call" else [])


@pytest.mark.parametrize("namespace_name", ["c-r_m", "functions"])
@pytest.mark.parametrize("format", get_args(ToolCallFormat))
async def test_every_tool_call_format_can_write_namespaces(format: ToolCallFormat, namespace_name: str) -> None:
    reasoning: Any = "harmony" if format == "harmony" else None
    formats = ModelFormats(tool_calls=format, supports_tools=True, reasoning=reasoning)
    model = fake_model(template=ChatTemplate(TOOLS), formats=formats)
    tool = {"type": "function", "name": "now-2"}
    choice = {"type": "function", "name": "now-2", "namespace": namespace_name}
    body = {"tools": [tool, namespace(namespace_name, tool)], "tool_choice": choice, "reasoning": {"effort": "none"}}
    call = await prepare(body, model=model)
    assert call.request.sampling.grammar is not None
    text = draw(call.request.sampling.grammar, byte_tokenizer(), 1, [])
    assert text is not None
    for event in await run_generation(call, text):
        call.writer.write(event)
    (item,) = call.writer.output
    assert (item["namespace"], item["name"], item["arguments"]) == (namespace_name, "now-2", "{}")


async def test_response_repeats_namespaces_as_sent() -> None:
    tools = [namespace("crm", ADD, QUERY), namespace("erp", ADD | {"strict": False})]
    call = await prepare({"tools": tools}, model=tool_model())
    response = to_json(call.writer.response)
    validate_openai(response, "Response")
    assert response["tools"] == [
        namespace("crm", ADD | {"strict": True}, QUERY),
        namespace("erp", ADD | {"strict": False}),
    ]


async def test_prompt_describes_namespaces_once() -> None:
    call = await prepare({"tools": [namespace("crm", ADD, QUERY, description="Customers.")]}, model=tool_model())
    prompt = prompt_of(call)
    assert prompt.count("Customers.") == 1
    assert '"crm.add"' in prompt
    assert '"crm.query"' in prompt


async def test_calls_in_the_input_are_rendered_with_their_namespace() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "add", "namespace": "erp", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "query", "namespace": "crm", "input": "abc"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
    ]
    ignored: list[str] = []
    call = await prepare({"input": items}, model=tool_model(), ignored=ignored)
    assert '<call>erp.add{"a": 1}<call>crm.query{"input": "abc"}[tool:erp.add]1#c1[tool:crm.query]' in prompt_of(call)
    assert [item.get("namespace") for item in call.input] == [None, "erp", "crm", None, None]
    for item in call.input:
        validate_openai(item, "ItemResource")
    assert ignored == []


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "add"}, ["add"]),
        ({"type": "function", "name": "add", "namespace": "erp"}, ["erp.add"]),
        ({"type": "custom", "name": "query"}, ["crm.query"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]},
            ["crm.add", "crm.query"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "tool_search"}, {"type": "function", "name": "add", "namespace": "erp"}],
            },
            ["erp.add", "tool_search"],
        ),
    ],
)
async def test_tool_choice_names_tools_of_namespaces(choice: dict[str, Any], names: list[str]) -> None:
    body = {"tools": [ADD, namespace("crm", ADD, QUERY), namespace("erp", ADD), SEARCH], "tool_choice": choice}
    call = await prepare(body, model=tool_model())
    validate_openai(to_json(call.writer.response), "Response")
    texts = {
        name: call_text(name, {"input": "abc"} if "query" in name else {"a": 1})
        for name in ("add", "crm.add", "crm.query", "erp.add", "tool_search")
    }
    assert call.request.sampling.grammar is not None
    assert [name for name, text in texts.items() if follows(call.request.sampling.grammar, text)] == names


FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "namespace", "name": "crm", "tools": []}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "crm"}]}, "tools[0]"),
        ({"tools": [namespace("c.r", ADD)]}, "tools[0].name"),
        ({"tools": [namespace("crm", {"type": "web_search"})]}, "tools[0].tools[0].type"),
        ({"tools": [namespace("crm", namespace("erp", ADD))]}, "tools[0].tools[0].type"),
        ({"tools": [namespace("crm", ADD, ADD)]}, "tools[0].tools[1].name"),
        ({"tools": [namespace("crm", ADD), namespace("crm", ADD)]}, "tools[1].tools[0].name"),
        (
            {"tools": [namespace("crm", ADD | {"strict": True, "parameters": {"not": {}}})]},
            "tools[0].tools[0].parameters.not",
        ),
        ({"tools": [namespace(f"n{i}", *({**ADD, "name": f"f{j}"} for j in range(120))) for i in range(9)]}, "tools"),
        ({"tools": [SEARCH, SEARCH]}, "tools[1].name"),
        ({"tools": [SEARCH | {"execution": "both"}]}, "tools[0].execution"),
        ({"tools": [SEARCH | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        (
            {
                "tools": [namespace("crm", ADD), namespace("erp", ADD)],
                "tool_choice": {"type": "function", "name": "add"},
            },
            "tool_choice.namespace",
        ),
        (
            {"tools": [namespace("crm", ADD)], "tool_choice": {"type": "function", "name": "add", "namespace": "erp"}},
            "tool_choice.name",
        ),
        ({"tools": [namespace("crm", ADD)], "tool_choice": {"type": "namespace", "name": "crm"}}, "tool_choice.type"),
        ({"input": [{"role": "user", "content": "x"}, FUNCTION_CALL | {"namespace": "a.b"}]}, "input[1].namespace"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "tool_search_output", "tools": 1}]}, "input[1].tools"),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "tool_search_output", "call_id": "c", "tools": [ADD]},
                ]
            },
            "input[1].call_id",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "additional_tools", "tools": [ADD | {"name": "a b"}]},
                ]
            },
            "input[1].tools[0].name",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_invalid_namespaces_and_searches_are_refused(body: dict[str, Any], param: str) -> None:
    error = await refused(body, model=tool_model())
    assert (error.status, error.param) == (400, param)


async def test_client_tool_search_is_called_by_its_schema() -> None:
    body = {"tools": [SEARCH], "tool_choice": "required"}
    valid = call_text("tool_search", {"a": 1})
    assert await allowed(body, valid, call_text("tool_search", {"a": "x"})) == [valid]
    events = await stream(body, valid, model=tool_model())
    response = events[-1]["response"]
    validate_openai(response, "Response")
    (item,) = response["output"]
    assert item == {
        "type": "tool_search_call",
        "id": item["id"],
        "call_id": item["call_id"],
        "status": "completed",
        "execution": "client",
        "arguments": {"a": 1},
    }
    assert event_types(events)[2:4] == ["output_item.added", "output_item.done"]
    assert response["tools"] == [SEARCH]
    assert "Finds tools." in prompt_of(await prepare(body, model=tool_model()))


async def test_tool_search_that_is_cut_off_is_incomplete() -> None:
    call = await prepare({"tools": [SEARCH], "max_output_tokens": 50}, model=tool_model())
    events = write_events(call, await run_generation(call, call_text("tool_search", {"a": 1})))
    (item,) = events[-1]["response"]["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", {})
    validate_openai(events[-1]["response"], "Response")


DEFERRED = ADD | {"defer_loading": True}
SEARCHED: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"a": 1}},
    {
        "type": "tool_search_output",
        "call_id": "c",
        "execution": "client",
        "tools": [DEFERRED, namespace("crm", DEFERRED)],
    },
]


async def test_tool_search_output_adds_its_tools() -> None:
    call = await prepare({"input": SEARCHED, "tools": [SEARCH]}, model=tool_model())
    prompt = prompt_of(call)
    assert '<call>tool_search{"a": 1}[tool:tool_search]Tools found: add, crm.add#c' in prompt
    assert '"name": "crm.add"' in prompt
    for item in call.input:
        validate_openai(item, "ItemResource")
    texts = [call_text("add", {"a": 1}), call_text("crm.add", {"a": 1}), call_text("tool_search", {"a": 1})]
    assert await allowed({"input": SEARCHED, "tools": [SEARCH], "tool_choice": "required"}, *texts) == texts
    # In later turns the items are part of the history, and the tools need not be sent again.
    later = context(call.input)
    assert await allowed({"tool_choice": "required"}, *texts, request_context=later) == texts[:2]


async def test_additional_tools_are_offered() -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": [ADD]}, {"role": "user", "content": "x"}]
    call = await prepare({"input": items}, model=tool_model())
    assert '[tools]{"name": "add"' in prompt_of(call)
    validate_openai(call.input[0], "ItemResource")


async def test_deferred_tools_are_offered_once_a_search_has_found_them() -> None:
    tools = [SEARCH, DEFERRED, namespace("crm", DEFERRED)]
    ignored: list[str] = []
    call = await prepare({"tools": tools}, model=tool_model(), ignored=ignored)
    assert "Adds." not in prompt_of(call)
    response = to_json(call.writer.response)
    validate_openai(response, "Response")
    assert response["tools"][1]["defer_loading"] is True
    assert '"add"' in prompt_of(await prepare({"tools": tools, "input": SEARCHED}, model=tool_model()))
    assert ignored == []


async def test_additional_tools_may_be_deferred() -> None:
    """As Codex does for some models: all tools are in an item."""
    added = {"type": "additional_tools", "role": "developer", "tools": [SEARCH, DEFERRED, QUERY, WEB]}
    ignored: list[str] = []
    call = await prepare({"input": [added, SEARCHED[0]]}, model=tool_model(), ignored=ignored)
    prompt = prompt_of(call)
    assert [name in prompt for name in ('"tool_search"', '"query"', '"add"')] == [True, True, False]
    assert ignored == ["input[0].tools[3] (web_search)"]
    assert '"add"' in prompt_of(await prepare({"input": [added, *SEARCHED]}, model=tool_model()))
    error = await refused({"input": [added, SEARCHED[0]]}, model=tool_model(unsupported_tools="refuse"))
    assert error.param == "input[0].tools[3].type"


async def test_deferred_tools_are_offered_at_once_without_a_search() -> None:
    ignored: list[str] = []
    search = {"type": "tool_search"}
    call = await prepare({"tools": [search, namespace("crm", DEFERRED)]}, model=tool_model(), ignored=ignored)
    assert '"crm.add"' in prompt_of(call)
    assert ignored == ["tools[0] (tool_search)", "tools[1].tools[0].defer_loading"]


async def test_search_items_of_the_server_need_no_call_id() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["crm"]}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [namespace("crm", ADD)]},
    ]
    call = await prepare({"input": items}, model=tool_model())
    assert "Tools found: crm.add" in prompt_of(call)
    for item in call.input:
        validate_openai(item, "ItemResource")
    await prepare({"input": [items[0], items[2]]}, model=tool_model())


@pytest.mark.parametrize("kind", [*HOSTED_TOOLS, "tool_search"])
async def test_hosted_tools_are_ignored_and_named(kind: str) -> None:
    ignored: list[str] = []
    call = await prepare({"tools": [ADD, {"type": kind}]}, model=tool_model(), ignored=ignored)
    assert ignored == [f"tools[1] ({kind})"]
    only = prompt_of(await prepare({"tools": [ADD]}, model=tool_model()))
    assert prompt_of(call) == only
    response = to_json(call.writer.response)
    validate_openai(response, "Response")
    assert response["tools"][1]["type"] == ("computer" if kind == "computer_use" else kind)


async def test_response_repeats_hosted_tools_as_sent() -> None:
    tool = {
        "type": "web_search",
        "external_web_access": False,
        "filters": {"allowed_domains": ["example.com"]},
        "search_context_size": "low",
    }
    call = await prepare({"tools": [tool | {"user_location": None}]})
    response = to_json(call.writer.response)
    validate_openai(response, "Response")
    assert response["tools"] == [tool]
    assert call.request.sampling.grammar is None


async def test_open_mode_does_not_repeat_hosted_tools() -> None:
    ignored: list[str] = []
    body = {"tools": [ADD, {"type": "web_search"}, {"type": "tool_search", "execution": "client"}]}
    call = await prepare(body, tool_model(), context(open_mode=True), ignored)
    response = to_json(call.writer.response)
    validate_open_responses(response)
    assert [tool["type"] for tool in response["tools"]] == ["function"]
    assert ignored == ["tools[1] (web_search)", "tools[2] (tool_search)"]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([ADD, WEB], WEB, "tool_choice.type"),
        ([ADD, WEB], {"type": "allowed_tools", "mode": "auto", "tools": [WEB]}, "tool_choice.tools[0].type"),
        ([WEB], "required", "tool_choice"),
        ([WEB], {"type": "function", "name": "add"}, "tool_choice.name"),
        ([{"type": "tool_search"}], "required", "tool_choice"),
    ],
)
async def test_tool_choice_that_asks_for_a_hosted_tool_is_refused(
    tools: list[dict[str, Any]], choice: Any, param: str
) -> None:
    error = await refused({"tools": tools, "tool_choice": choice}, model=tool_model())
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_hosted_tools_alone_are_like_no_tools(choice: str | None) -> None:
    body = {"tools": [WEB], "tool_choice": choice, "grammar": {"type": "regex", "value": "a+"}}
    call = await prepare(body, model=tool_model())
    assert call.request.output.tool_calls is None


@pytest.mark.parametrize("tool", [WEB, {"type": "tool_search"}])
async def test_hosted_tools_are_refused_by_a_server_that_is_set_to(tool: dict[str, Any]) -> None:
    error = await refused({"tools": [ADD, tool]}, model=plain_model(unsupported_tools="refuse"))
    assert (error.status, error.param) == (400, "tools[1].type")
    assert tool["type"] in error.message
    await respond({"tools": [ADD]}, model=plain_model(unsupported_tools="refuse"))


async def test_unknown_tool_types_are_refused() -> None:
    error = await refused({"tools": [{"type": "teleport"}]})
    assert error.param == "tools[0].type"
    assert "namespace" in error.message
