"""Tests of the response writer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syringa.errors import EngineError, EngineOverloaded, InvalidRequest
from syringa.events import Finished, TextDelta, Usage
from tests.api.responses.helpers import (
    context,
    event_types,
    prepare,
    rebuild_output,
    respond,
    run_generation,
    stream,
    to_json,
    write_events,
)
from tests.chat_models import reasoning_model, tool_model
from tests.fake_engine import FakeEngine
from tests.schemas import validate_open_responses, validate_openai

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SQL = {"type": "custom", "name": "sql"}
MESSAGE = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUERY = '<tool_call>\n{"name": "sql", "arguments": {"input": "select \\"é\\"\\n;"}}\n</tool_call>'


async def test_response_matches_both_schemas() -> None:
    response = await respond({"instructions": "be brief", "metadata": {"k": "v"}})
    (message,) = response["output"]
    assert message == {
        "type": "message",
        "id": message["id"],
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
    }
    assert message["id"].startswith("msg_")
    assert response["id"].startswith("resp_")
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    assert response["usage"]["output_tokens"] == 6
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 6
    assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert (response["service_tier"], response["store"], response["truncation"]) == ("default", True, "disabled")


@pytest.mark.parametrize("open_mode", [False, True])
async def test_writer_streams_text_in_openai_order(open_mode: bool) -> None:
    events = await stream({}, open_mode=open_mode)
    assert event_types(events) == ["created", "in_progress", "output_item.added", *MESSAGE, "completed"]
    assert rebuild_output(events) == events[-1]["response"]["output"]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress"
    validate_openai(events[-1]["response"], "Response")
    validate_open_responses(events[-1]["response"])


@pytest.mark.parametrize(("open_mode", "name"), [(False, "reasoning_text"), (True, "reasoning")])
async def test_writer_streams_reasoning_first(open_mode: bool, name: str) -> None:
    events = await stream({}, "<think>hm</think>yes", model=reasoning_model(), open_mode=open_mode)
    reasoning_events = ["content_part.added", f"{name}.delta", f"{name}.done", "content_part.done", "output_item.done"]
    assert event_types(events) == [
        "created", "in_progress", "output_item.added", *reasoning_events, "output_item.added", *MESSAGE, "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["summary"] == []
    assert "encrypted_content" not in reasoning
    assert message["content"][0]["text"] == "yes"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_writer_encrypts_reasoning_on_request() -> None:
    body = {"include": ["reasoning.encrypted_content"], "store": False}
    events = await stream(body, "<think>hm</think>yes", model=reasoning_model())
    first = events[-1]["response"]["output"][0]
    assert first["encrypted_content"].startswith("sealed:")
    done = next(each for each in events if each["type"] == "response.output_item.done")
    assert done["item"] == first


@pytest.mark.parametrize("open_mode", [False, True])
async def test_writer_streams_function_call(open_mode: bool) -> None:
    events = await stream({"tools": [ADD]}, CALL, model=tool_model(), open_mode=open_mode)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert event_types(events) == ["created", "in_progress", *call, "completed"]
    (item,) = events[-1]["response"]["output"]
    assert item == {
        "type": "function_call",
        "id": item["id"],
        "status": "completed",
        "call_id": item["call_id"],
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert item["id"].startswith("fc_")
    assert item["call_id"].startswith("call_")
    assert rebuild_output(events) == [item]


async def test_writer_streams_custom_call_as_text() -> None:
    events = await stream({"tools": [SQL]}, QUERY, model=tool_model())
    call = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
    assert event_types(events) == ["created", "in_progress", *call, "completed"]
    (item,) = rebuild_output(events)
    assert item["id"].startswith("ctc_")
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "sql", 'select "é"\n;')


async def test_writer_streams_text_and_two_calls() -> None:
    events = await stream({"tools": [ADD]}, f"first {CALL}\n{CALL}", model=tool_model())
    output = rebuild_output(events)
    assert [each["type"] for each in output] == ["message", "function_call", "function_call"]
    assert output == events[-1]["response"]["output"]


async def test_writer_drops_calls_above_max_tool_calls() -> None:
    body = {"tools": [ADD], "max_tool_calls": 2}
    call = await prepare(body, model=tool_model())
    output = rebuild_output(write_events(call, await run_generation(call, f"{CALL}\n{CALL}\n{CALL}")))
    assert [each["type"] for each in output] == ["function_call"] * 2
    one = await prepare(body | {"max_tool_calls": 1}, model=tool_model())
    assert one.request.sampling.grammar is not None


@pytest.mark.parametrize(
    ("script", "model", "kind"),
    [
        ("hello", None, "message"),
        ("<think>hm", reasoning_model(), "reasoning"),
        (CALL[:-15], tool_model(), "function_call"),
    ],
)
async def test_writer_marks_cut_output_incomplete(script: str, model: Any, kind: str) -> None:
    body: dict[str, Any] = {"max_output_tokens": len(script) - 1, "tools": [ADD] if kind == "function_call" else None}
    events = await stream(body, script, model=model)
    assert event_types(events)[-2:] == ["output_item.done", "incomplete"]
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert response["output"][-1]["type"] == kind
    assert response["output"][-1]["status"] == "incomplete"
    validate_open_responses(response)


async def test_writer_writes_empty_output_as_empty_message() -> None:
    events = await stream({}, "")
    assert rebuild_output(events) == events[-1]["response"]["output"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("open_mode", [False, True])
async def test_writer_returns_logprobs_of_text_tokens(open_mode: bool) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await stream(body, "hé", open_mode=open_mode)
    scores = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [each["bytes"] for each in scores] == [[104], [195], [169], []]
    assert [len(each["top_logprobs"]) for each in scores] == [2] * 4
    deltas = [each["logprobs"] for each in events if each["type"] == "response.output_text.delta"]
    assert [each for some in deltas for each in some] == scores
    assert (await respond(body))["top_logprobs"] == 2


async def test_writer_begins_queued_response() -> None:
    call = await prepare({"background": True})
    events = [to_json(each) for each in call.writer.begin(queued=True)]
    assert [each["type"] for each in events] == ["response.created", "response.queued", "response.in_progress"]
    assert [each["response"]["status"] for each in events] == ["queued", "queued", "in_progress"]
    for event in events:
        validate_openai(event, "ResponseStreamEvent")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineOverloaded("The queue is full."), "rate_limit_exceeded", "The queue is full."),
        (EngineError("The engine failed."), "server_error", "The engine failed."),
        (InvalidRequest("The grammar is too large."), "invalid_prompt", "The grammar is too large."),
        (RuntimeError("secret"), "server_error", "The server failed on this request."),
    ],
)
@pytest.mark.parametrize("open_mode", [False, True])
async def test_writer_keeps_output_after_failure(error: Exception, code: str, message: str, open_mode: bool) -> None:
    call = await prepare({}, request_context=context(open_mode=open_mode))
    events = [*call.writer.begin(), *call.writer.write(TextDelta(0, "hel")), *call.writer.fail(error)]
    sent = [to_json(each) for each in events]
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))
    response = sent[-1]["response"]
    assert sent[-1]["type"] == "response.failed"
    assert response["error"] == {"code": code, "message": message}
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    validate_openai(response, "Response")
    validate_open_responses(response)
    assert call.writer.status == "failed"
    assert call.writer.write(TextDelta(0, "lo")) == []
    assert call.writer.fail(error) == []


async def test_writer_keeps_output_after_cancel() -> None:
    call = await prepare({})
    call.writer.begin()
    call.writer.write(TextDelta(0, "hel"))
    response = to_json(call.writer.cancel())
    assert (response["status"], response["output"][0]["status"]) == ("cancelled", "incomplete")
    assert call.writer.output == response["output"]
    assert call.writer.write(Finished(0, "stop")) == []
    validate_openai(response, "Response")
    validate_open_responses(response)


async def test_writer_snapshots_do_not_change() -> None:
    call = await prepare({})
    events = call.writer.begin()
    events += call.writer.write(TextDelta(0, "a"))
    before = msgspec.json.encode([events, call.writer.response])
    snapshot = call.writer.response
    for each in (TextDelta(0, "b"), Finished(0, "stop"), Usage(1, 1)):
        call.writer.write(each)
    assert msgspec.json.encode([events, snapshot]) == before


async def test_writer_does_not_complete_without_usage() -> None:
    call = await prepare({})
    generated = await run_generation(call, FakeEngine("x"))
    assert event_types(write_events(call, generated[:-1]))[-1] == "output_item.done"
    assert call.writer.status == "in_progress"
