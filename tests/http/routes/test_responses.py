from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from syringa.api.decoding import MAX_DEPTH
from syringa.config import Config
from syringa.errors import EngineOverloaded, EngineUnavailable, StoreUnavailable
from syringa.store import Store
from tests.chat_models import plain_model, reasoning_model, tool_model, vision_model
from tests.client import eventually, server
from tests.fake_engine import FakeEngine
from tests.http.responses_client import PATH, ResponsesClient, responses_client, stream_events, text_of
from tests.schemas import validate_openai

IMAGE = {
    "type": "input_image",
    "image_url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAA"
    "AAAElFTkSuQmCC",
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


async def stored(http: ResponsesClient, id: str) -> dict[str, Any]:
    answer = await http.get(f"{PATH}/{id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_response_is_stored(database: str) -> None:
    async with responses_client(database) as http:
        response = await http.respond(metadata={"a": "b"})
        validate_openai(response, "Response")
        assert (response["status"], text_of(response)) == ("completed", "hello")
        assert await stored(http, response["id"]) == response
    async with responses_client(database) as http:  # another process, after a restart
        assert await stored(http, response["id"]) == response


async def test_stream_ends_with_the_stored_response(database: str) -> None:
    async with responses_client(database) as http:
        seen = await http.stream()
        for number, event in enumerate(seen):
            validate_openai(event, "ResponseStreamEvent")
            assert event["sequence_number"] == number
        assert [event["type"] for event in seen[:2]] == ["response.created", "response.in_progress"]
        assert "".join(e["delta"] for e in seen if e["type"] == "response.output_text.delta") == "hello"
        assert seen[-1]["type"] == "response.completed"
        assert await stored(http, seen[0]["response"]["id"]) == seen[-1]["response"]


async def test_response_is_stored_before_its_last_event(file: str) -> None:
    """A client can continue a response as soon as it has received the last event."""
    async with responses_client(file) as http:
        for _ in range(5):
            seen = await http.stream()
            await http.respond(previous_response_id=seen[-1]["response"]["id"])


async def test_response_is_not_stored_with_store_false(file: str) -> None:
    async with responses_client(file) as http:
        response = await http.respond(store=False)
        assert not response["store"]
        await http.stream(store=False)
        assert http.app_state.responses._store._database is None, "the store must not be opened"
        assert (await http.get(f"{PATH}/{response['id']}")).status_code == 404


@pytest.mark.parametrize(("mode", "setting"), [("open-responses", "openai"), (None, "open-responses")])
async def test_open_responses_mode_changes_event_names(file: str, mode: str | None, setting: Any) -> None:
    engine = FakeEngine(b"<think>hm</think>hello")
    headers = {"x-syringa-responses-mode": mode} if mode else {}
    async with responses_client(file, engine, model=reasoning_model(), responses_mode=setting) as http:
        answer = await http.post(PATH, json={"input": "hi", "stream": True}, headers=headers)
        seen = stream_events(answer.text, done=True)
        assert "response.reasoning.delta" in [event["type"] for event in seen]
        theirs = await http.post(
            PATH, json={"input": "hi", "stream": True}, headers={"x-syringa-responses-mode": "openai"}
        )
        seen = stream_events(theirs.text)
        assert "response.reasoning_text.delta" in [event["type"] for event in seen]
        wrong = await http.post(PATH, json={"input": "hi"}, headers={"x-syringa-responses-mode": "other"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-syringa-responses-mode")


async def test_deleted_response_is_gone(database: str) -> None:
    async with responses_client(database) as http:
        id = (await http.respond())["id"]
        assert (await http.delete(f"{PATH}/{id}")).json() == {"id": id, "object": "response", "deleted": True}
        for answer in (await http.get(f"{PATH}/{id}"), await http.delete(f"{PATH}/{id}")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


async def test_input_items_are_paginated(database: str) -> None:
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    async with responses_client(database) as http:
        id = (await http.respond(items))["id"]

        async def page(**query: Any) -> dict[str, Any]:
            answer = await http.get(f"{PATH}/{id}/input_items", params=query)
            assert answer.status_code == 200, answer.text
            body: dict[str, Any] = answer.json()
            validate_openai(body, "ResponseItemList")
            return body

        def texts(body: dict[str, Any]) -> str:
            return "".join(each["content"][0]["text"] for each in body["data"])

        whole = await page()
        assert (texts(whole), whole["has_more"]) == ("43210", False)
        first = await page(order="asc", limit=2)
        assert (texts(first), first["has_more"]) == ("01", True)
        assert [first["first_id"], first["last_id"]] == [each["id"] for each in first["data"]]
        rest = await page(order="asc", limit=100, after=first["last_id"])
        assert (texts(rest), rest["has_more"]) == ("234", False)
        assert texts(await page(order="asc", before=rest["first_id"])) == "01"
        empty = await page(order="asc", after=rest["last_id"])
        assert (empty["data"], empty["first_id"]) == ([], "")
        for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"include": "x"}):
            answer = await http.get(f"{PATH}/{id}/input_items", params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))
        assert (await http.get(f"{PATH}/{id}/input_items", params={"after": "x"})).status_code == 404
        assert (await http.get(f"{PATH}/other/input_items")).status_code == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"stream": "true", "starting_after": "9" * 30}, "starting_after"),
        ({"include_obfuscation": "true"}, "include_obfuscation"),
        ({"include": "nonsense"}, "include"),
    ],
)
async def test_retrieval_validates_its_query(file: str, query: dict[str, str], param: str) -> None:
    async with responses_client(file) as http:
        id = (await http.respond())["id"]
        answer = await http.get(f"{PATH}/{id}", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        good = {"include[]": "message.output_text.logprobs", "stream": "false"}
        assert (await http.get(f"{PATH}/{id}", params=good)).status_code == 200


async def test_input_tokens_are_counted(database: str) -> None:
    async with responses_client(database) as http:
        answer = await http.post(f"{PATH}/input_tokens", json={"input": "hi", "instructions": "be"})
        validate_openai(answer.json(), "TokenCountsResource")
        assert answer.json() == {"object": "response.input_tokens", "input_tokens": len("[s]be[u]hi[a]")}
        before = (await http.respond())["id"]
        more = await http.post(f"{PATH}/input_tokens", json={"input": "x", "previous_response_id": before})
        assert more.json()["input_tokens"] == len("[u]hi[a]hello[u]x[a]")


async def test_images_are_counted_as_in_the_response(database: str) -> None:
    engine = FakeEngine("hello")
    engine.image_tokens = 50
    content = [IMAGE, {"type": "input_text", "text": "Which is darker?"}, IMAGE]
    input = [{"role": "user", "content": content}]
    async with responses_client(database, engine, model=vision_model()) as http:
        answer = await http.post(f"{PATH}/input_tokens", json={"input": input})
        counted = answer.raise_for_status().json()["input_tokens"]
        assert counted == len("[user]XWhich is darker?X[assistant]".replace("X", "<image>")) + 2 * 49
        assert counted == (await http.respond(input=input))["usage"]["input_tokens"]
        engine.fail, engine.fail_first = EngineUnavailable("The worker died."), True
        assert (await http.post(f"{PATH}/input_tokens", json={"input": input})).status_code == 503


async def test_compacted_conversation_can_be_continued(database: str) -> None:
    async with responses_client(database) as http:
        before = (await http.respond())["id"]
        answer = await http.post(f"{PATH}/compact", json={"model": "fake", "previous_response_id": before})
        assert answer.status_code == 200, answer.text
        validate_openai(answer.json(), "CompactResource")
    async with responses_client(database) as http:
        output = answer.json()["output"]
        await http.respond([*output, {"role": "user", "content": "more"}])
        assert http.prompt() == "[u]hi[a]hello[u]more[a]", "the summary is the output of the fake engine"


async def test_encrypted_reasoning_is_restored(database: str) -> None:
    engine = FakeEngine(b"<think>a plan</think>hello")
    body: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    async with responses_client(database, engine, model=reasoning_model()) as http:
        output = (await http.respond(**body))["output"]
        thought = next(item for item in output if item["type"] == "reasoning")
        assert "plan" not in thought["encrypted_content"]
        thought.pop("content")
    async with responses_client(database, FakeEngine("x"), model=reasoning_model()) as http:
        await http.respond([*output, {"role": "user", "content": "go on"}], **body)
        assert "<think>a plan</think>" in http.prompt()


PATCH = """
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF -> line)+
%import common.LF
"""
AGENT: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199f3b6-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"installation": "1"},
}


async def test_coding_agent_can_continue_without_storage(file: str) -> None:
    """As Codex does: nothing is stored, reasoning is sent encrypted, and every request has the whole conversation."""
    call = b'<tool_call>{"name": "exec_command", "arguments": {"cmd": "ls"}}</tool_call>'
    asked = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Read only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ]
    async with responses_client(file, FakeEngine(b"<think>a plan</think>" + call), model=reasoning_model()) as http:
        answer = await http.post(PATH, json=AGENT | {"input": asked})
        assert answer.status_code == 200, answer.text
        # Fields without effect are named.
        assert set(answer.headers["x-syringa-ignored"].split(", ")) >= {"client_metadata", "reasoning.summary"}
        events = stream_events(answer.text)
        for event in events:
            validate_openai(event, "ResponseStreamEvent")
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == ["reasoning", "function_call"]
        thought, called = ({name: each for name, each in item.items() if name != "content"} for item in done)
        assert thought["encrypted_content"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "a.txt"}
    async with responses_client(file, FakeEngine(b"</think>done"), model=reasoning_model()) as http:
        answer = await http.post(PATH, json=AGENT | {"input": [*asked, thought, called, result]})
        assert stream_events(answer.text)[-1]["type"] == "response.completed"
        assert "encrypted_content" not in answer.headers["x-syringa-ignored"]
        assert "<think>a plan</think>" in http.prompt()
        assert "a.txt" in http.prompt()


@pytest.mark.parametrize("kind", ["web_search", "local_shell", "tool_search", "image_generation"])
async def test_hosted_tool_is_named_in_the_header(file: str, kind: str) -> None:
    body = AGENT | {"input": "hi", "tools": [*AGENT["tools"], {"type": kind}]}
    async with responses_client(file) as http:
        answer = await http.post(PATH, json=body)
        assert stream_events(answer.text)[-1]["type"] == "response.completed"
        assert f"tools[2] ({kind})" in answer.headers["x-syringa-ignored"].split(", ")
    async with responses_client(file, unknown_fields="refuse") as http:
        error = await http.expect_error(400, tools=[{"type": kind}])
        assert error["param"] == "tools[0]"


CALENDAR: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__calendar__",
    "description": "A calendar.",
    "tools": [{"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}}],
}


async def test_stored_response_has_the_namespaces_of_its_calls(file: str) -> None:
    call = b'<tool_call>{"name": "mcp__calendar__.list", "arguments": {}}</tool_call>'
    async with responses_client(file, FakeEngine(call), model=tool_model()) as http:
        created = await http.respond(tools=[CALENDAR])
        found = await stored(http, created["id"])
        validate_openai(found, "Response")
        assert found["tools"] == created["tools"]
        (item,) = found["output"]
        assert (item["namespace"], item["name"]) == ("mcp__calendar__", "list")
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "nothing"}
        await http.respond([result], previous_response_id=created["id"], tools=[CALENDAR])
        assert "<call>mcp__calendar__.list{}[tool:mcp__calendar__.list]nothing" in http.prompt()


async def test_tools_that_a_search_found_stay_in_the_chain(file: str) -> None:
    search = {"type": "tool_search", "execution": "client"}
    call = b'<tool_call>{"name": "tool_search", "arguments": {"query": "dates"}}</tool_call>'
    async with responses_client(file, FakeEngine(call), model=tool_model()) as http:
        first = await http.respond(tools=[search])
        (item,) = first["output"]
        assert (item["type"], item["arguments"]) == ("tool_search_call", {"query": "dates"})
        output = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [CALENDAR]}
        second = await http.respond([output], previous_response_id=first["id"], tools=[search])
        await http.respond("go on", previous_response_id=second["id"], tools=[search])
        for prompt in (http.prompt(-2), http.prompt()):
            assert '"name": "mcp__calendar__.list"' in prompt
        assert '"name": "mcp__calendar__.list"' not in http.prompt(0)
        listed = await http.get(f"{PATH}/{second['id']}/input_items")
        for stored_item in listed.json()["data"]:
            validate_openai(stored_item, "ItemResource")


async def test_deeply_nested_values_can_be_repeated_and_continued(file: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 10):
        deep = {"a": deep}
    items = [
        {"role": "user", "content": "x"},
        {"type": "tool_search_call", "call_id": "c", "arguments": deep},
        {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "web_search", "filters": deep}]},
    ]
    tools = [{"type": "web_search", "filters": deep}, {"type": "tool_search", "parameters": deep}]
    async with responses_client(file, model=tool_model()) as http:
        first = await http.respond(items, tools=tools)
        assert first["tools"][0] == tools[0]
        await http.respond("y", previous_response_id=first["id"], tools=tools)
        error = await http.expect_error(400, tools=[{"type": "web_search", "filters": {"a": [[[[[[[[deep]]]]]]]]}}])
        assert "nested too deeply" in error["message"]


@pytest.mark.parametrize(("mode", "status"), [("open-responses", 400), ("openai", 200)])
async def test_compaction_needs_a_model_in_open_mode_only(file: str, mode: str, status: int) -> None:
    async with responses_client(file) as http:
        headers = {"x-syringa-responses-mode": mode}
        answer = await http.post(f"{PATH}/compact", json={"input": "hi"}, headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["param"] == "model"
        assert (
            await http.post(f"{PATH}/compact", json={"input": "hi", "model": "fake"}, headers=headers)
        ).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_error_before_the_first_event_has_its_status(file: str, stream: bool) -> None:
    engine = FakeEngine("hello")
    engine.fail, engine.fail_first = EngineOverloaded("full"), True
    async with responses_client(file, engine) as http:
        error = await http.expect_error(503, stream=stream)
        assert error["code"] == "engine_overloaded"


async def test_failed_stream_is_reported_and_stored(database: str) -> None:
    engine = FakeEngine("hello")
    engine.fail = EngineUnavailable("it died")
    async with responses_client(database, engine) as http:
        seen = await http.stream()
        for event in seen:
            validate_openai(event, "ResponseStreamEvent")
        assert seen[-1]["type"] == "response.failed"
        failed = await stored(http, seen[0]["response"]["id"])
        assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "it died"})
        assert failed["usage"] == seen[-1]["response"]["usage"]
        assert failed["usage"]["output_tokens"] == 1  # generated before the failure
        error = await http.expect_error(400, previous_response_id=failed["id"])
        assert "has failed" in error["message"]
        open_ = await http.post(
            PATH, json={"input": "x", "stream": True}, headers={"x-syringa-responses-mode": "open-responses"}
        )
        assert stream_events(open_.text, done=True)[-1]["type"] == "response.failed"


async def test_request_timeout_fails_the_response(file: str) -> None:
    long: dict[str, Any] = {"ignore_eos": True, "max_output_tokens": 3000}
    async with responses_client(file, FakeEngine("hello", delay=0.02), request_timeout=6.5) as http:
        await http.app_state.responses.store.open()  # the timeout includes queries
        seen = await http.stream(**long)
        assert seen[-1]["response"]["error"]["message"] == "The request took longer than 6.5 seconds."
        assert not http.engine.running
    async with responses_client(file, FakeEngine("hello", delay=0.02), request_timeout=0.5) as http:
        assert (await http.expect_error(503, **long))["code"] == "timeout"
        assert not http.engine.running


async def test_unavailable_store_prevents_generation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with responses_client(str(tmp_path / "file" / "below.db")) as http:
        for stream in (True, False):
            error = await http.expect_error(503, stream=stream)
            assert error["code"] == "store_unavailable"
            assert "cannot be stored" in error["message"]
        assert not http.engine.requests
        assert text_of(await http.respond(store=False)) == "hello"


async def test_store_failure_at_the_end_is_retried_after_the_response(
    file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unavailable(self: Store, function: Any) -> Any:
        raise StoreUnavailable("away")

    async with responses_client(file, FakeEngine("hello", delay=0.02)) as http:
        await http.respond()
        for stream in (False, True):
            with monkeypatch.context() as patch:
                http.engine.pause()
                task = asyncio.create_task(http.stream() if stream else http.respond())  # type: ignore[arg-type]
                assert await eventually(lambda: http.engine.running)
                patch.setattr(Store, "write", unavailable)
                http.engine.resume()
                answer = await task
            response = answer[-1]["response"] if isinstance(answer, list) else answer
            assert (response["status"], text_of(response)) == ("completed", "hello")
            assert "write failed, will retry" in caplog.text
            # The write is retried until it succeeds.
            assert await eventually_stored(http, response["id"], "completed")
            assert await stored(http, response["id"]) == response


async def eventually_stored(http: ResponsesClient, id: str, status: str) -> bool:
    for _ in range(3000):
        if (await stored(http, id))["status"] == status:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_cancels_the_response(database: str, stream: bool) -> None:
    engine = FakeEngine("hello", delay=0.01)
    config = Config(port=0, drain_timeout=1.0, database=database)
    body = {"input": "hi", "stream": stream, "ignore_eos": True, "max_output_tokens": 3000}
    async with server(engine, config, model=plain_model()) as http:
        if stream:
            async with http.stream("POST", PATH, json=body) as answer:
                lines = answer.aiter_lines()
                while "delta" not in await anext(lines):
                    pass
        else:
            waiting = asyncio.create_task(http.post(PATH, json=body))
            assert await eventually(lambda: engine.delivered >= 3)
            waiting.cancel()
        assert await eventually(lambda: not engine.running)
        id = engine.requests[0].id
        for _ in range(3000):
            found = (await http.get(f"{PATH}/{id}")).json()
            if found["status"] != "in_progress":
                break
            await asyncio.sleep(0.01)
    assert found["status"] == "cancelled"
    assert text_of(found).startswith("h")
    validate_openai(found, "Response")


async def test_keep_alive_comments_follow_the_opening_events(file: str) -> None:
    async with responses_client(file, FakeEngine("ab", delay=0.2), keep_alive=0.05) as http:
        answer = await http.post(PATH, json={"input": "x", "stream": True})
    assert answer.text.startswith("event: response.created\ndata: {")
    assert ": waiting\n\n" in answer.text
    assert stream_events(answer.text)[-1]["type"] == "response.completed"


async def test_unknown_fields_are_ignored_or_rejected(file: str) -> None:
    async with responses_client(file) as http:
        answer = await http.post(PATH, json={"input": "x", "what": 1})
        assert answer.headers["x-syringa-ignored"] == "what"
    async with responses_client(file, unknown_fields="refuse") as http:
        assert (await http.expect_error(400, what=1))["param"] == "what"
        assert not http.engine.requests
