"""The Responses API with MCP servers, over HTTP and on a real MCP server."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from syringa import logs
from syringa.config import Config
from tests.chat_models import tool_model
from tests.client import eventually, server
from tests.http.responses_client import PATH, responses_client, stream_events
from tests.mcp_server import LABEL, DiceServer, ScriptedEngine, call, dice_server
from tests.schemas import validate_openai

ROLL = call("roll", sides=6)


@pytest.fixture(scope="module")
def shared_dice() -> Iterator[DiceServer]:
    with dice_server() as dice:
        yield dice


@pytest.fixture
def dice(shared_dice: DiceServer) -> DiceServer:
    shared_dice.begin_test()
    return shared_dice


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


def client(file: str, dice: DiceServer, *scripts: str, **settings: Any) -> Any:
    given = {"model": tool_model(), "mcp_hosts": (dice.host,)} | settings
    return responses_client(file, ScriptedEngine(scripts), **given)


def types(items: list[dict[str, Any]]) -> list[str]:
    return [item["type"] for item in items]


async def test_response_lists_calls_and_answers(file: str, dice: DiceServer) -> None:
    async with client(file, dice, ROLL, "You rolled 6.") as http:
        response = await http.respond(tools=[dice.tool()])
        validate_openai(response, "Response")
        listed, called, message = response["output"]
        assert types(response["output"]) == ["mcp_list_tools", "mcp_call", "message"]
        assert [tool["name"] for tool in listed["tools"]] == ["roll", "fail", "hang", "much"]
        assert (called["server_label"], called["name"], called["arguments"]) == (LABEL, "roll", '{"sides": 6}')
        assert (called["status"], called["output"], called["error"]) == ("completed", "rolled 6", None)
        assert message["content"][0]["text"] == "You rolled 6."
        assert dice.calls == [("roll", 6)]
        assert "[tool:dice.roll]rolled 6" in http.engine.prompt()
        stored = await http.get(f"{PATH}/{response['id']}")
        assert stored.json() == response


async def test_stream_has_the_events_of_lists_and_calls(file: str, dice: DiceServer) -> None:
    async with client(file, dice, ROLL, "done") as http:
        seen = await http.stream(tools=[dice.tool()])
        for number, event in enumerate(seen):
            validate_openai(event, "ResponseStreamEvent")
            assert event["sequence_number"] == number
        names = [event["type"].removeprefix("response.") for event in seen]
        names = [name for i, name in enumerate(names) if not (i and name == names[i - 1])]
        assert names == [
            "created", "in_progress",
            "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
            "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done",
            "mcp_call.completed", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done", "completed",
        ]  # fmt: skip
        assert "".join(e["delta"] for e in seen if e["type"].endswith("arguments.delta")) == '{"sides": 6}'
        done = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
        assert done == seen[-1]["response"]["output"]


async def test_next_response_reuses_the_list(file: str, dice: DiceServer) -> None:
    async with client(file, dice, ROLL, "You rolled 6.", "Bye.") as http:
        first = await http.respond(tools=[dice.tool()])
        before = len(dice.methods)
        second = await http.respond("bye", tools=[dice.tool()], previous_response_id=first["id"])
        assert types(second["output"]) == ["message"]
        assert len(dice.methods) == before
        assert '"name": "dice.roll"' in http.engine.prompt()  # still offered
        assert "[tool:dice.roll]rolled 6" in http.engine.prompt()  # and remembered


async def test_input_of_a_stateless_client_has_the_list_and_the_call(file: str, dice: DiceServer) -> None:
    async with client(file, dice, ROLL, "You rolled 6.", "Bye.") as http:
        first = await http.respond(tools=[dice.tool()], store=False)
        before = len(dice.methods)
        items = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "bye"}]
        second = await http.respond(items, tools=[dice.tool()], store=False)
        assert types(second["output"]) == ["message"]
        assert len(dice.methods) == before
        assert "[tool:dice.roll]rolled 6" in http.engine.prompt()


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, {"roll", "fail", "hang", "much"}),
        (["roll", "much"], {"roll", "much"}),
        ({"tool_names": ["fail"]}, {"fail"}),
        ({"read_only": True}, {"roll"}),
        ({"read_only": False, "tool_names": ["roll", "fail"]}, {"fail"}),
        ([], set()),
    ],
)
async def test_only_allowed_tools_are_offered(file: str, dice: DiceServer, allowed: Any, names: set[str]) -> None:
    async with client(file, dice, "hi") as http:
        response = await http.respond(tools=[dice.tool(allowed_tools=allowed)])
        validate_openai(response, "Response")
        assert {name for name in ("roll", "fail", "hang", "much") if f"dice.{name}" in http.engine.prompt()} == names


async def test_call_waits_for_approval(file: str, dice: DiceServer) -> None:
    tool = dice.tool(require_approval="always")
    async with client(file, dice, ROLL, "You rolled 6.") as http:
        asked = await http.respond(tools=[tool])
        validate_openai(asked, "Response")
        request = asked["output"][-1]
        assert types(asked["output"]) == ["mcp_list_tools", "mcp_approval_request"]
        assert (request["name"], request["arguments"], asked["status"]) == ("roll", '{"sides": 6}', "completed")
        assert dice.calls == []
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
        events = await http.stream([answer], tools=[tool], previous_response_id=asked["id"])
        for event in events:
            validate_openai(event, "ResponseStreamEvent")
        done = events[-1]["response"]
        assert types(done["output"]) == ["mcp_call", "message"]
        assert (done["output"][0]["output"], done["output"][0]["approval_request_id"]) == ("rolled 6", request["id"])
        assert dice.calls == [("roll", 6)]
        assert len(http.engine.requests) == 2
        assert "[tool:dice.roll]rolled 6" in http.engine.prompt()
        items = (await http.get(f"{PATH}/{done['id']}/input_items")).json()
        validate_openai(items, "ResponseItemList")
        again = await http.expect_error(400, input=[answer], tools=[tool], previous_response_id=done["id"])
        assert (again["param"], "answered before" in again["message"]) == ("input[0].approval_request_id", True)
        assert dice.calls == [("roll", 6)]


async def test_refused_call_is_not_executed(file: str, dice: DiceServer) -> None:
    tool = dice.tool(require_approval="always")
    async with client(file, dice, ROLL, "As you wish.") as http:
        events = await http.stream(tools=[tool])
        for event in events:
            validate_openai(event, "ResponseStreamEvent")
        assert types(events)[-3:] == ["response.output_item.added", "response.output_item.done", "response.completed"]
        asked = events[-1]["response"]
        answer = {
            "type": "mcp_approval_response",
            "approval_request_id": asked["output"][-1]["id"],
            "approve": False,
            "reason": "no gambling",
        }
        done = await http.respond([answer], tools=[tool], previous_response_id=asked["id"])
        assert types(done["output"]) == ["message"]
        assert dice.calls == []
        assert "[tool:dice.roll]The user has refused this call. no gambling" in http.engine.prompt()


async def test_approval_needs_an_earlier_request_and_its_tool(file: str, dice: DiceServer) -> None:
    request = {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "server_label": LABEL,
        "name": "roll",
        "arguments": '{"sides": 6}',
    }
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    question = {"role": "user", "content": "hi"}
    async with client(file, dice, "hi") as http:
        error = await http.expect_error(400, input=[question, answer], tools=[dice.tool()])
        assert error["param"] == "input[1].approval_request_id"
        error = await http.expect_error(400, input=[question, request, answer, answer], tools=[dice.tool()])
        assert error["param"] == "input[3].approval_request_id"
        for tools in ([], [dice.tool(allowed_tools=["fail"])], [dice.tool(server_label="other")]):
            error = await http.expect_error(400, input=[question, request, answer], tools=tools)
            assert error["param"] == "input[2].approval_request_id"
        assert dice.calls == []
        response = await http.respond([question, request, answer], tools=[dice.tool()], store=False)
        assert types(response["output"]) == ["mcp_list_tools", "mcp_call", "message"]
        assert dice.calls == [("roll", 6)]


async def test_failed_call_is_reported_to_client_and_model(file: str, dice: DiceServer) -> None:
    async with client(file, dice, call("fail"), "Sorry.") as http:
        events = await http.stream(tools=[dice.tool()])
        for event in events:
            validate_openai(event, "ResponseStreamEvent")
        assert "response.mcp_call.failed" in types(events)
        _, called, message = events[-1]["response"]["output"]
        assert (called["status"], called["output"]) == ("failed", None)
        assert called["error"]["type"] == "mcp_tool_execution_error"
        assert message["type"] == "message"
        assert "[tool:dice.fail]Error: " in http.engine.prompt()


async def test_result_that_is_too_large_is_an_error_of_the_call(file: str, dice: DiceServer) -> None:
    async with client(file, dice, call("much", size=100_000), "Sorry.", mcp_max_bytes=50_000) as http:
        _, called, message = (await http.respond(tools=[dice.tool()]))["output"]
        assert (called["status"], called["error"]["type"], message["type"]) == ("failed", "http_error", "message")
        assert "more than 50000 bytes (mcp_max_bytes)" in http.engine.prompt()


@pytest.mark.parametrize(
    ("body", "settings", "expected"),
    [({"max_tool_calls": 2}, {}, 2), ({}, {"mcp_calls_per_response": 3}, 3), ({"max_tool_calls": 1}, {}, 1)],
)
async def test_number_of_calls_is_bounded(file: str, dice: DiceServer, body: Any, settings: Any, expected: int) -> None:
    engine = ScriptedEngine([ROLL] * expected + ["enough"])
    async with responses_client(file, engine, model=tool_model(), mcp_hosts=(dice.host,), **settings) as http:
        response = await http.respond(tools=[dice.tool()], **body)
        assert types(response["output"]) == ["mcp_list_tools", *["mcp_call"] * expected, "message"]
        assert dice.calls == [("roll", 6)] * expected
        grammars = [request.sampling.grammar for request in engine.requests]
        assert all("dice.roll" in grammar.value for grammar in grammars[:-1] if grammar is not None)
        assert grammars[-1] is None or "dice.roll" not in grammars[-1].value


async def test_parallel_calls_above_the_operators_bound_are_dropped(file: str, dice: DiceServer) -> None:
    async with client(file, dice, "\n".join([ROLL] * 5), "enough", mcp_calls_per_response=2) as http:
        response = await http.respond(tools=[dice.tool()])
        assert types(response["output"]) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
        assert dice.calls == [("roll", 6)] * 2


async def test_required_call_is_required_once(file: str, dice: DiceServer) -> None:
    choice = {"type": "mcp", "server_label": LABEL, "name": "roll"}
    async with client(file, dice, ROLL, "You rolled 6.") as http:
        response = await http.respond(tools=[dice.tool()], tool_choice=choice)
        validate_openai(response, "Response")
        assert types(response["output"]) == ["mcp_list_tools", "mcp_call", "message"]
        assert response["tool_choice"] == choice
        forced, free = (request.sampling.grammar for request in http.engine.requests)
        assert forced is not None
        assert "dice.roll" in forced.value
        assert "dice.fail" not in forced.value
        assert free is None or free != forced


async def test_tool_choice_must_name_a_tool_of_the_server(file: str, dice: DiceServer) -> None:
    async with client(file, dice, "hi") as http:
        for choice in ({"server_label": "other"}, {"server_label": LABEL, "name": "other"}):
            error = await http.expect_error(400, tools=[dice.tool()], tool_choice={"type": "mcp"} | choice)
            assert error["param"] == "tool_choice.name"


async def test_function_calls_of_the_client_end_the_turn(file: str, dice: DiceServer) -> None:
    function = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    async with client(file, dice, f"{ROLL}\n{call('add', None)}", "fine") as http:
        response = await http.respond(tools=[dice.tool(), function])
        assert types(response["output"]) == ["mcp_list_tools", "mcp_call", "function_call"]
        assert response["output"][1]["output"] == "rolled 6"
        output = {"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": "3"}
        await http.respond([output], tools=[dice.tool(), function], previous_response_id=response["id"])
        assert "[tool:dice.roll]rolled 6" in http.engine.prompt()
        assert "[tool:add]3" in http.engine.prompt()


async def test_output_tokens_are_bounded_over_all_rounds(file: str, dice: DiceServer) -> None:
    length = len(ROLL) + 1
    async with client(file, dice, ROLL, "x" * 50) as http:
        response = await http.respond(tools=[dice.tool()], max_output_tokens=length + 10)
        assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
        assert response["output"][-1]["content"][0]["text"] == "x" * 10
        assert response["usage"]["output_tokens"] == length + 10
    async with client(file, dice, ROLL, "x" * 50) as http:
        response = await http.respond(tools=[dice.tool()], max_output_tokens=length)
        assert (response["status"], types(response["output"])) == ("incomplete", ["mcp_list_tools", "mcp_call"])
    async with client(file, dice, ROLL) as http:
        calls = len(dice.calls)
        response = await http.respond(tools=[dice.tool()], max_output_tokens=length - 20)
        assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")
        assert len(dice.calls) == calls


async def test_usage_is_the_sum_of_all_rounds_in_one_record(file: str, dice: DiceServer) -> None:
    records: list[Any] = []
    async with client(file, dice, ROLL, "You rolled 6.") as http:
        http.app_state.observers.append(records.append)
        response = await http.respond(tools=[dice.tool()])
        prompts = [len(request.prompt) for request in http.engine.requests]
        assert response["usage"]["input_tokens"] == sum(prompts)
        assert response["usage"]["output_tokens"] == len(ROLL) + 1 + len("You rolled 6.") + 1
        (record,) = records
        assert (record.stats.prompt_tokens, record.outcome) == (sum(prompts), "ok")


async def test_secrets_reach_the_server_and_nothing_else(
    file: str, dice: DiceServer, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = ("s3cret-token", "s3cret-header", dice.token)
    tool = dice.tool(authorization=secrets[0], headers={"X-Team": secrets[1]})
    caplog.set_level("DEBUG")
    logs.PROMPTS.setLevel("INFO")
    try:
        async with client(file, dice, ROLL, "You rolled 6.") as http:
            response = await http.respond(tools=[tool])
            validate_openai(response, "Response")
            events = await http.stream(tools=[tool], background=True)
            invalid = await http.post(PATH, content=json.dumps({"tools": [tool]})[:-1])
            refused = await http.expect_error(400, tools=[tool | {"headers": {"Host": secrets[1]}}])
    finally:
        logs.PROMPTS.setLevel(logging.CRITICAL + 1)
    sent = [headers for headers in dice.headers if headers.get("authorization") == f"Bearer {secrets[0]}"]
    assert sent == dice.headers
    assert all(headers["x-team"] == secrets[1] for headers in sent)
    assert response["tools"][0]["server_url"] == f"http://{dice.host}/"
    syringa_log = [record.getMessage() for record in caplog.records if record.name.startswith("syringa")]
    assert any(message.startswith("request: ") for message in syringa_log)
    stored = b"".join(path.read_bytes() for path in Path(file).parent.rglob("*") if path.is_file())
    assert response["id"].encode() in stored
    for secret in secrets:
        assert secret not in json.dumps([response, events, invalid.text, refused])
        assert secret not in "\n".join(syringa_log)
        assert secret.encode() not in stored


async def test_servers_are_refused_unless_the_operator_allows_their_host(file: str, dice: DiceServer) -> None:
    for hosts, words in (
        ((), "setting mcp_hosts"),
        (("example.com",), "'127.0.0.1' is not one of those"),
        (("127.0.0.1:1",), "'127.0.0.1' is not one of those"),
    ):
        async with client(file, dice, "hi", mcp_hosts=hosts) as http:
            error = await http.expect_error(400, tools=[dice.tool()])
            assert (error["param"], words in error["message"]) == ("tools[0].server_url", True), error
    assert dice.headers == []


async def test_any_host_is_any_public_host(file: str, dice: DiceServer) -> None:
    async with client(file, dice, "hi", mcp_hosts=("*",)) as http:
        error = await http.expect_error(424, tools=[dice.tool()])
        assert "no address that may be connected to" in error["message"]
        assert dice.headers == []


async def test_servers_are_refused_without_the_extra(
    file: str, dice: DiceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "syringa.service.mcp.connection", None)
    async with client(file, dice, "hi") as http:
        error = await http.expect_error(400, tools=[dice.tool()])
        assert (error["param"], "pip install 'syringa[mcp]'" in error["message"]) == ("tools[0].server_url", True)


async def test_server_that_cannot_list_its_tools_fails_the_request(file: str, dice: DiceServer) -> None:
    async with client(file, dice, "hi") as http:
        dice.refuse_with = 401
        error = await http.expect_error(424, tools=[dice.tool()])
        assert (error["type"], error["param"], "401" in error["message"]) == (
            "external_connector_error", "tools[0]", True,
        )  # fmt: skip
        assert http.engine.requests == []


async def test_open_responses_have_no_servers(file: str, dice: DiceServer) -> None:
    async with client(file, dice, "hi", responses_mode="open-responses") as http:
        error = await http.expect_error(400, tools=[dice.tool()])
        assert (error["param"], dice.headers) == ("tools[0].type", [])


async def test_connectors_are_reported_as_ignored(file: str, dice: DiceServer) -> None:
    connector = {"type": "mcp", "server_label": "mail", "connector_id": "connector_gmail", "authorization": "s3cret"}
    async with client(file, dice, "hi") as http:
        answer = await http.post(PATH, json={"input": "hi", "tools": [connector]})
        assert answer.headers["x-syringa-ignored"] == "tools[0] (mcp)"
        validate_openai(answer.json(), "Response")
        assert "s3cret" not in answer.text


async def test_background_response_calls_tools(file: str, dice: DiceServer) -> None:
    async with client(file, dice, ROLL, "You rolled 6.") as http:
        events = await http.stream(tools=[dice.tool()], background=True)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert types(events[-1]["response"]["output"]) == ["mcp_list_tools", "mcp_call", "message"]
        again = await http.get(f"{PATH}/{events[-1]['response']['id']}", params={"stream": "true"})
        assert stream_events(again.text) == events


async def test_cancelled_background_response_cancels_its_call(file: str, dice: DiceServer) -> None:
    async with client(file, dice, call("hang"), "late") as http:
        response = await http.respond(tools=[dice.tool()], background=True)
        assert await eventually(dice.hanging.is_set)
        cancelled = (await http.post(f"{PATH}/{response['id']}/cancel")).json()
        assert await eventually(dice.cancelled.is_set)
        assert (cancelled["status"], cancelled["output"][-1]["status"]) == ("cancelled", "incomplete")
        validate_openai(cancelled, "Response")


async def test_websocket_response_calls_tools_and_remembers_the_list(file: str, dice: DiceServer) -> None:
    config = Config(port=0, drain_timeout=1.0, database=file, mcp_hosts=(dice.host,))
    async with server(ScriptedEngine([ROLL, "You rolled 6.", "Bye."]), config, tool_model()) as http:
        url = str(http.base_url).replace("http:", "ws:") + PATH
        async with connect(url, proxy=None) as socket:
            body: dict[str, Any] = {"type": "response.create", "input": "hi", "tools": [dice.tool()], "store": False}
            first = await _receive_response(socket, body)
            assert types(first["output"]) == ["mcp_list_tools", "mcp_call", "message"]
            before = len(dice.methods)
            second = await _receive_response(socket, body | {"previous_response_id": first["id"]})
            assert types(second["output"]) == ["message"]
            assert len(dice.methods) == before


async def _receive_response(socket: ClientConnection, body: dict[str, Any]) -> dict[str, Any]:
    await socket.send(json.dumps(body))
    while True:
        event = json.loads(await asyncio.wait_for(socket.recv(), 60))
        validate_openai(event, "ResponseStreamEvent")
        if event["type"] == "response.completed":
            response: dict[str, Any] = event["response"]
            return response


async def test_client_that_disconnects_cancels_the_call(file: str, dice: DiceServer) -> None:
    config = Config(port=0, drain_timeout=1.0, database=file, mcp_hosts=(dice.host,))
    async with server(ScriptedEngine([call("hang"), "late"]), config, tool_model()) as http:
        body = {"input": "hi", "tools": [dice.tool()], "stream": True}
        async with http.stream("POST", PATH, json=body) as answer:
            async for line in answer.aiter_lines():
                if "mcp_call_arguments.done" in line:
                    assert await eventually(dice.hanging.is_set)
                    assert not dice.cancelled.is_set()
                    break
        assert await eventually(dice.cancelled.is_set)


async def test_deadline_ends_a_response_whose_call_hangs(file: str, dice: DiceServer) -> None:
    async with client(file, dice, call("hang"), "late", mcp_timeout=0) as http:
        headers = {"x-syringa-timeout": "1"}
        answer = await http.post(PATH, json={"input": "hi", "tools": [dice.tool()]}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")


async def test_input_tokens_count_the_tools_of_a_server(file: str, dice: DiceServer) -> None:
    async with client(file, dice, "hi") as http:
        counted = [
            (await http.post(f"{PATH}/input_tokens", json={"input": "hi", "tools": tools})).json()["input_tokens"]
            for tools in ([], [dice.tool()])
        ]
        response = await http.respond(tools=[dice.tool()])
        assert counted[0] < counted[1] == response["usage"]["input_tokens"]


async def test_conversation_keeps_calls(file: str, dice: DiceServer) -> None:
    async with client(file, dice, ROLL, "You rolled 6.", "Bye.") as http:
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        await http.respond(tools=[dice.tool()], conversation=conversation)
        items = (await http.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"})).json()["data"]
        assert types(items) == ["message", "mcp_list_tools", "mcp_call", "message"]
        await http.respond("bye", conversation=conversation)
        assert "[tool:dice.roll]rolled 6" in http.engine.prompt()
