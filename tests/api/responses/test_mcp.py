"""The `mcp` tool of responses: its fields, filters and items, with a client that needs no server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from syringa.api.responses import ResponseContext
from syringa.api.responses.mcp.tools import McpServerTool, mcp_tool_echo, read_mcp_server
from syringa.errors import EngineUnavailable, FailedDependency, InvalidRequest
from syringa.events import Event, Finished, ToolCallDelta, ToolCallStart
from syringa.remote_tools import RemoteCallFinished, RemoteConnection, RemoteResult, RemoteServer, RemoteTool
from tests.api.responses.helpers import context, event_types, prepare, prompt, refused, to_json, write_events
from tests.chat_models import tool_model
from tests.schemas import validate_openai

TOOL = {"type": "mcp", "server_label": "dice", "server_url": "https://example.test/mcp", "require_approval": "never"}
ROLL = RemoteTool(
    name="roll",
    description="Roll a die.",
    input_schema={"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]},
    annotations={"readOnlyHint": True},
)
THROW = RemoteTool(name="throw", input_schema={"type": "object"})


class FakeClient:
    """A client that allows every URL."""

    def __init__(self, *tools: RemoteTool) -> None:
        self.tools = list(tools)
        self.servers: list[RemoteServer] = []
        self.fail = False

    async def check_url(self, url: str, param: str) -> None:
        pass

    async def list_tools(self, server: RemoteServer, param: str) -> list[RemoteTool]:
        self.servers.append(server)
        if self.fail:
            raise FailedDependency("down", param=param)
        return self.tools

    def connect(self, server: RemoteServer) -> RemoteConnection:
        return FakeConnection()


class FakeConnection:
    async def call_tool(self, name: str, arguments: dict[str, Any]) -> RemoteResult:
        return RemoteResult(output=name)

    def close(self) -> None:
        pass


def mcp_context(*tools: RemoteTool, **kwargs: Any) -> ResponseContext:
    return dataclasses.replace(context(**kwargs), mcp=FakeClient(*tools), max_mcp_calls=10)


def read(**fields: Any) -> McpServerTool:
    return read_mcp_server(TOOL | fields, "tools[0]")


@pytest.mark.parametrize(
    ("given", "roll", "throw"),
    [
        (None, True, True),
        ("always", True, True),
        ("never", False, False),
        ({"always": {"tool_names": ["throw"]}}, False, True),
        ({"never": {"tool_names": ["roll"]}}, False, True),
        ({"never": {"read_only": True}}, False, True),
        ({"always": {"read_only": True}, "never": {"tool_names": ["roll", "throw"]}}, True, False),
        ({"always": {"tool_names": ["x"]}, "never": {"tool_names": ["roll"]}}, False, True),
        ({"never": {"tool_names": ["roll", "throw"], "read_only": False}}, True, False),
        ({"never": {"tool_names": []}}, True, True),
    ],
)
def test_approval_is_required_where_the_client_wants_it(given: Any, roll: bool, throw: bool) -> None:
    approval = read(require_approval=given).approval
    assert (approval.requires(ROLL), approval.requires(THROW)) == (roll, throw)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"server_label": None}, "tools[0]"),
        ({"server_label": "two words"}, "tools[0].server_label"),
        ({"server_url": 7}, "tools[0].server_url"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id"),
        ({"require_approval": "sometimes"}, "tools[0].require_approval"),
        ({"require_approval": 7}, "tools[0].require_approval"),
        ({"require_approval": {"never": {}}}, "tools[0].require_approval.never"),
        ({"require_approval": {"sometimes": {}}}, "tools[0].require_approval.sometimes"),
        ({"require_approval": {"never": {"names": ["x"]}}}, "tools[0].require_approval.never.names"),
        ({"require_approval": {"never": ["x"]}}, "tools[0].require_approval.never"),
        ({"allowed_tools": "all"}, "tools[0].allowed_tools"),
        ({"allowed_tools": [7]}, "tools[0].allowed_tools.tool_names[0]"),
        ({"allowed_tools": {"names": []}}, "tools[0].allowed_tools.names"),
        ({"headers": {"Host": "x"}}, "tools[0].headers.Host"),
        ({"headers": {"content-LENGTH": "x"}}, "tools[0].headers.content-LENGTH"),
        ({"headers": {"Mcp-Session-Id": "x"}}, "tools[0].headers.Mcp-Session-Id"),
        ({"headers": {"a b": "x"}}, "tools[0].headers"),
        ({"headers": {"a": "x\r\nb: c"}}, "tools[0].headers.a"),
        ({"headers": {"a": "é"}}, "tools[0].headers.a"),
        ({"headers": {str(i): "x" for i in range(65)}}, "tools[0].headers"),
        ({"headers": {"a": 7}}, "tools[0].headers[...]"),
        ({"authorization": "x\n"}, "tools[0].authorization"),
        ({"authorization": "x", "headers": {"AUTHORIZATION": "y"}}, "tools[0].authorization"),
    ],
)
def test_invalid_field_is_refused_by_its_path(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_secrets_are_left_out_of_texts() -> None:
    tool = read(authorization="s3cret", headers={"X-Key": "s3cret"}, server_url="https://example.test/s3cret?k=s3cret")
    assert tool.server.headers == {"X-Key": "s3cret", "Authorization": "Bearer s3cret"}
    assert "s3cret" not in repr(tool)
    echo = mcp_tool_echo(TOOL | {"authorization": "s3cret", "headers": {}, "server_url": tool.server.url})
    assert echo["server_url"] == "https://example.test/"
    assert "s3cret" not in str(echo)
    assert "server_url" not in mcp_tool_echo(TOOL | {"server_url": "https://user:s3cret@example.test/"})


async def test_tools_are_offered_under_the_label_of_their_server() -> None:
    text = await prompt(
        {"tools": [TOOL | {"server_description": "Games of chance."}]},
        model=tool_model(),
        request_context=mcp_context(ROLL, THROW),
    )
    assert '"name": "dice.roll"' in text
    assert '"name": "dice.throw"' in text
    assert text.count("dice: Games of chance.") == 1


async def test_two_servers_may_have_tools_of_the_same_name() -> None:
    tools = [TOOL, TOOL | {"server_label": "cards"}]
    text = await prompt({"tools": tools}, model=tool_model(), request_context=mcp_context(ROLL))
    assert "dice.roll" in text
    assert "cards.roll" in text
    error = await refused({"tools": [TOOL, TOOL]}, model=tool_model(), request_context=mcp_context(ROLL))
    assert (error.status, error.param) == (400, "tools")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": 7},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"pattern": "("}}},
        {"type": "object", "not": {"type": "object"}},
        {"type": "string"},
        {"type": 7},
        {},
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tool_with_an_unusable_schema_is_still_offered(schema: Any, choice: str) -> None:
    odd = RemoteTool(name="odd", description="Odd.", input_schema=schema)
    body = {"tools": [TOOL], "tool_choice": choice}
    text = await prompt(body, model=tool_model(), request_context=mcp_context(odd))
    assert '"name": "dice.odd"' in text


async def test_tool_with_a_deeply_nested_schema_is_offered_without_it() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(20_000):
        schema = {"type": "object", "properties": {"a": schema}}
    deep = RemoteTool(name="deep", input_schema=schema)
    assert "dice.deep" in await prompt({"tools": [TOOL]}, model=tool_model(), request_context=mcp_context(deep))


async def test_tool_whose_name_cannot_be_called_is_reported_as_ignored() -> None:
    ignored: list[str] = []
    odd = RemoteTool(name='a "b"\n', input_schema={"type": "object"})
    await prepare({"tools": [TOOL]}, model=tool_model(), request_context=mcp_context(odd, ROLL), ignored=ignored)
    assert ignored == ['tools[0] (a "b"\n)']


async def test_server_with_too_many_tools_is_refused_unless_some_are_allowed() -> None:
    many = [RemoteTool(name=f"tool{index}", input_schema={"type": "object"}) for index in range(1025)]
    error = await refused({"tools": [TOOL]}, model=tool_model(), request_context=mcp_context(*many))
    assert (error.status, error.param, "allowed_tools" in error.message) == (400, "tools[0]", True)
    body = {"tools": [TOOL | {"allowed_tools": ["tool7"]}]}
    assert "dice.tool7" in await prompt(body, model=tool_model(), request_context=mcp_context(*many))


async def test_list_in_the_input_takes_the_place_of_listing() -> None:
    listed = {
        "type": "mcp_list_tools",
        "server_label": "dice",
        "tools": [{"name": "old", "input_schema": {"type": "object"}}],
    }
    request_context = mcp_context(ROLL)
    question = {"role": "user", "content": "hi"}
    text = await prompt(
        {"input": [listed, question], "tools": [TOOL]}, model=tool_model(), request_context=request_context
    )
    assert "dice.old" in text
    assert "dice.roll" not in text
    assert isinstance(request_context.mcp, FakeClient)
    assert request_context.mcp.servers == []
    failed = listed | {"error": "down", "tools": []}
    text = await prompt(
        {"input": [failed, question], "tools": [TOOL]}, model=tool_model(), request_context=request_context
    )
    assert "dice.roll" in text


async def test_calls_in_the_history_are_part_of_the_prompt() -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "dice", "name": "roll", "arguments": '{"sides": 6}'}
    history = [
        {"role": "user", "content": "hi"},
        call | {"output": "6", "status": "completed"},
        call | {"id": "mcp_2", "error": {"type": "http_error", "code": 502, "message": "down"}, "status": "failed"},
        call | {"id": "mcp_3", "error": "lost", "status": "failed"},
        call | {"id": "mcp_4", "status": "incomplete"},
        call | {"id": "mcp_5", "arguments": '{"sides', "status": "incomplete"},
    ]
    text = await prompt({"input": "and?"}, model=tool_model(), request_context=mcp_context(history=history))
    results = [part.split("#")[0] for part in text.split("[tool:dice.roll]")[1:]]
    assert results == ["6", "Error: down", "Error: lost"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "mcp_call"}, "input[1]"),
        ({"type": "mcp_call", "server_label": "x", "name": "y", "arguments": "{"}, "input[1].arguments"),
        ({"type": "mcp_list_tools", "server_label": "x", "tools": [{"name": "y"}]}, "input[1].tools[0]"),
        ({"type": "mcp_approval_request", "server_label": "x"}, "input[1]"),
        ({"type": "mcp_approval_response", "approval_request_id": "x"}, "input[1]"),
        (
            {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True},
            "input[1].approval_request_id",
        ),
    ],
)
async def test_invalid_item_is_refused_by_its_path(item: Any, param: str) -> None:
    question = {"role": "user", "content": "hi"}
    error = await refused({"input": [question, item]}, model=tool_model(), request_context=mcp_context(ROLL))
    assert (error.status, error.param) == (400, param)


async def test_failed_response_has_the_calls_that_were_not_executed() -> None:
    prepared = await prepare({"tools": [TOOL]}, model=tool_model(), request_context=mcp_context(ROLL))
    generated: list[Event] = [
        ToolCallStart(0, 0, "call_1", "dice.roll"),
        ToolCallDelta(0, 0, '{"sides": 6}'),
        ToolCallStart(0, 1, "call_2", "dice.roll"),
        ToolCallDelta(0, 1, '{"sides": 7}'),
        Finished(0, "tool_calls"),
    ]
    events = write_events(prepared, generated)
    assert len(prepared.writer.waiting_calls) == 2
    prepared.writer.write(RemoteCallFinished("call_1", RemoteResult(output="6")))
    closing = [to_json(event) for event in prepared.writer.fail(EngineUnavailable("late"))]
    assert event_types(closing) == ["output_item.done", "failed"]
    for event in (*events, *closing):
        validate_openai(event, "ResponseStreamEvent")
    output = closing[-1]["response"]["output"]
    assert [(item["status"], item["output"]) for item in output] == [("completed", "6"), ("incomplete", None)]


async def test_server_that_fails_ends_the_others() -> None:
    request_context = mcp_context(ROLL)
    assert isinstance(request_context.mcp, FakeClient)
    request_context.mcp.fail = True
    tools = [TOOL | {"server_label": f"s{index}"} for index in range(3)]
    error = await refused({"tools": tools}, model=tool_model(), request_context=request_context)
    assert (error.status, error.param) == (424, "tools[0]")
    tools = [TOOL | {"server_label": f"s{index}"} for index in range(17)]
    error = await refused({"tools": tools}, model=tool_model(), request_context=request_context)
    assert (error.status, error.param) == (400, "tools")
