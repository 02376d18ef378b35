"""Ollama's endpoints that generate, on the fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.config import Config
from syringa.errors import EngineUnavailable
from tests.chat_models import plain_model, reasoning_model, tool_model, vision_model
from tests.client import client, eventually, server
from tests.fake_engine import FakeEngine, fake_model
from tests.http.routes.ollama_requests import (
    CHAT,
    GENERATE,
    HI,
    PIXEL,
    lines,
    refused,
    send,
    text_of,
)

DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


COUNTS = ("prompt_eval_count", "eval_count")


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_stream_is_lines_of_json_with_counts_and_times_in_the_last(path: str) -> None:
    *parts, last = lines(await send(path, {"model": "fake:latest"}, FakeEngine("hé!")))
    assert "".join(text_of(path, part) for part in parts) == "hé!"
    for part in parts:
        assert (part["model"], part["done"]) == ("fake:latest", False)
        assert not part.keys() & {*DURATIONS, *COUNTS, "done_reason", "context"}
        assert part["created_at"].endswith("Z")
    assert (last["done"], last["done_reason"], text_of(path, last)) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (len("[u]hi[a]"), 5)
    assert all(type(last[name]) is int for name in DURATIONS)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_body_without_streaming_is_the_fold_of_the_lines(path: str) -> None:
    answer = await send(path, {"stream": False, "model": "alias"})
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert (body["model"], body["done"], body["done_reason"], text_of(path, body)) == ("alias", True, "stop", "hello")
    assert body["eval_count"] == 6
    assert body.keys() >= {*DURATIONS, *COUNTS, "created_at"}


async def test_durations_are_those_of_the_clocks_of_the_server() -> None:
    engine = FakeEngine("ab", delay=0.05)
    engine.queued_ms = 30
    last = lines(await send(CHAT, {}, engine))[-1]
    assert last["eval_duration"] >= 2 * 0.05e9  # two more tokens after the first
    assert 0 < last["prompt_eval_duration"] < last["total_duration"] - last["eval_duration"] - 0.02e9
    assert last["load_duration"] == 0


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_options_reach_the_engine(path: str) -> None:
    engine = FakeEngine("hello")
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": 11, "repeat_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 3, "stop": ["zz"], "mirostat": 2, "nope": 1,
    }  # fmt: skip
    answer = await send(path, {"options": options, "shift": True}, engine)
    assert answer.headers["x-syringa-ignored"] == "shift, options.nope, options.mirostat"
    assert lines(answer)[-1]["done_reason"] == "length"
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.seed, sampling.repetition_penalty) == (11, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert request.stopping.max_tokens == 3


async def test_defaults_are_ollamas_and_output_may_fill_the_context() -> None:
    engine = FakeEngine("hello")
    await send(CHAT, {}, engine)
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.8, 40, 0.9)
    assert (request.sampling.repetition_penalty, request.stopping.max_tokens) == (1.0, 4096 - len("[u]hi[a]"))


async def test_num_predict_beyond_the_context_does_not_make_the_prompt_too_long() -> None:
    engine = FakeEngine("hello")
    await send(CHAT, {"options": {"num_ctx": 20, "num_predict": 1000}}, engine)
    assert engine.requests[0].stopping.max_tokens == 20 - len("[u]hi[a]")


async def test_old_turns_are_dropped_unless_truncate_is_false() -> None:
    engine = FakeEngine("hello")
    turns = [{"role": "user", "content": "old " * 10}, {"role": "assistant", "content": "old"}, *HI]
    await send(CHAT, {"messages": turns, "options": {"num_ctx": 30}}, engine)
    assert bytes(engine.requests[0].prompt) == b"[u]hi[a]"
    message = await refused(CHAT, {"messages": turns, "options": {"num_ctx": 30}, "truncate": False})
    assert "maximum context length is 30" in message


async def test_stop_ends_the_output_and_errors_name_the_option() -> None:
    *_, last = found = lines(await send(CHAT, {"options": {"stop": "ll"}}))
    assert "".join(text_of(CHAT, each) for each in found) == "he"
    assert last["done_reason"] == "stop"
    assert (await refused(CHAT, {"options": {"stop": [""]}})).startswith("options.stop[0]")


async def test_last_text_of_the_assistant_is_continued() -> None:
    engine = FakeEngine("hello")
    await send(CHAT, {"messages": [*HI, {"role": "assistant", "content": "Well, "}]}, engine)
    assert bytes(engine.requests[0].prompt) == b"[u]hi[a]Well, "


async def test_tool_calls_are_whole_and_have_objects_as_arguments() -> None:
    script = (
        'Let me see.<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    found = lines(await send(CHAT, {"tools": tools}, FakeEngine(script), tool_model()))
    calls = [call for line in found for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "f", "arguments": {"a": [1, 2]}},
        {"index": 1, "name": "g", "arguments": {}},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert found[-1]["done_reason"] == "stop"
    whole = (await send(CHAT, {"tools": tools, "stream": False}, FakeEngine(script), tool_model())).json()
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [call["function"] for call in calls]
    assert whole["message"]["content"] == "".join(text_of(CHAT, line) for line in found)


async def test_call_with_arguments_nested_too_deeply_is_left_out() -> None:
    script = '<tool_call>\n{"name": "f", "arguments": {"a": %s}}\n</tool_call>' % ("[" * 1500 + "]" * 1500)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    *_, last = lines(await send(CHAT, {"tools": tools}, FakeEngine(script), tool_model()))
    whole = (await send(CHAT, {"tools": tools, "stream": False}, FakeEngine(script), tool_model())).json()
    for each in (last, whole):
        assert each["done"]
        assert "tool_calls" not in each["message"]


async def test_results_of_tools_need_no_ids() -> None:
    engine = FakeEngine("sunny")
    history = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "21 degrees", "tool_name": "f"},
    ]
    await send(CHAT, {"messages": history, "stream": False}, engine, tool_model())
    assert b'<call>f{"x": 1}[tool:f]21 degrees' in bytes(engine.requests[0].prompt)


async def test_thinking_is_a_field_of_its_own() -> None:
    script = "<think>hm</think>yes"
    found = lines(await send(CHAT, {"think": True}, FakeEngine(script), reasoning_model()))
    assert "".join(line["message"].get("thinking", "") for line in found) == "hm"
    assert "".join(text_of(CHAT, line) for line in found) == "yes"
    body = (await send(GENERATE, {"stream": False}, FakeEngine(script), reasoning_model())).json()
    assert (body["thinking"], body["response"]) == ("hm", "yes")


async def test_think_turns_reasoning_off_or_is_refused_where_there_is_none() -> None:
    engine = FakeEngine("yes")
    await send(CHAT, {"think": False}, engine, reasoning_model())
    assert bytes(engine.requests[0].prompt).endswith(b"<think></think>")
    assert await refused(CHAT, {"think": "low"}) == '"fake" does not support thinking'
    assert (await refused(CHAT, {"think": "hard"})).startswith("think: expected")
    assert (await send(CHAT, {"think": False})).status_code == 200


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_format_becomes_a_grammar(path: str, format: Any) -> None:
    engine = FakeEngine("{}")
    assert (await send(path, {"format": format}, engine)).status_code == 200
    assert engine.requests[0].sampling.grammar is not None


async def test_format_that_cannot_be_enforced_is_named_or_refused() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    answer = await send(CHAT, {"format": schema}, FakeEngine("[1]"))
    assert answer.headers["x-syringa-ignored"] == "format.uniqueItems"
    assert "format" in await refused(CHAT, {"format": "yaml"})
    assert "Invalid type: nothing" in await refused(CHAT, {"format": {"type": "nothing"}})
    assert (await send(CHAT, {"format": ""})).status_code == 200


async def test_logprobs_are_in_the_lines_of_their_tokens() -> None:
    body = {"logprobs": True, "top_logprobs": 2}
    found = [each for line in lines(await send(CHAT, body, FakeEngine("ab"))) for each in line.get("logprobs", ())]
    assert [each["token"] for each in found] == ["a", "b", "<end>"]
    assert found[0]["bytes"] == [97]
    assert len(found[0]["top_logprobs"]) == 2
    whole = (await send(GENERATE, body | {"stream": False}, FakeEngine("ab"))).json()
    assert [each["token"] for each in whole["logprobs"]] == ["a", "b", "<end>"]


async def test_images_are_sent_to_a_model_with_vision_and_refused_by_others() -> None:
    engine = FakeEngine("a pixel")
    messages = [{"role": "user", "content": "what?", "images": [PIXEL]}]
    await send(CHAT, {"messages": messages}, engine, vision_model())
    answer = await send(GENERATE, {"prompt": "what?", "images": [PIXEL], "stream": False}, engine, vision_model())
    assert "context" not in answer.json()
    assert [(bytes(each.prompt), len(each.images)) for each in engine.requests] == [
        (b"[user]what?<image>[assistant]", 1),
        (b"[user]what?<image>[assistant]", 1),
    ]


async def test_images_in_errors_have_their_names_in_ollamas_api() -> None:
    unsupported, no_image = "this model does not support images.", "the data URI is not valid base64."
    for text in ("what?", ""):
        user = {"role": "user", "content": text}
        message = await refused(CHAT, {"messages": [*HI, user | {"images": [PIXEL]}]})
        assert message == f"messages[1].images[0]: {unsupported}"
        message = await refused(CHAT, {"messages": [user | {"images": [PIXEL, "?"]}]}, model=vision_model())
        assert message.startswith(f"messages[0].images[1]: {no_image}")
    for system in ("s", None):
        body = {"prompt": "what?", "system": system}
        assert await refused(GENERATE, body | {"images": [PIXEL]}) == f"images[0]: {unsupported}"
        message = await refused(GENERATE, body | {"images": [PIXEL, "?"]}, model=vision_model())
        assert message.startswith(f"images[1]: {no_image}")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": HI}, 400, "model"),
        ({"model": ""}, 400, "model"),
        ({"model": "other", "messages": HI}, 404, "model 'other' not found"),
        ({"model": "other:latest", "messages": HI}, 404, "model 'other:latest' not found"),
        ({"model": "fake", "messages": "hi"}, 400, "messages"),
        ({"model": "fake", "messages": HI, "options": []}, 400, "options"),
        ({"model": "fake", "messages": HI, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"model": "fake", "messages": [{"role": "hero", "content": "x"}]}, 400, "messages[0].role"),
    ],
)
async def test_invalid_request_is_refused_in_ollamas_shape(body: dict[str, Any], status: int, message: str) -> None:
    engine = FakeEngine("x")
    async with client(engine, model=plain_model()) as http:
        answer = await http.post(CHAT, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert message in answer.json()["error"]
    assert not engine.requests


async def test_other_errors_have_ollamas_shape_too() -> None:
    async with client(config=Config(api_key=("k",), max_body_bytes=50)) as http:
        seen = [
            await http.post(CHAT, json={}),
            await http.get(CHAT, headers={"authorization": "Bearer k"}),
            await http.post(CHAT, content=b"x" * 51, headers={"authorization": "Bearer k"}),
            await http.post(CHAT, content=b"{", headers={"authorization": "Bearer k", "content-type": "text/plain"}),
            await http.post("/api/pull", json={"model": "x"}, headers={"authorization": "Bearer k"}),
        ]
    assert [each.status_code for each in seen] == [401, 405, 413, 415, 403]
    assert all(type(each.json()["error"]) is str for each in seen)


async def test_error_after_the_first_line_is_the_last_line() -> None:
    engine = FakeEngine("hello")
    engine.fail = EngineUnavailable("The engine is gone.")
    *parts, last = lines(await send(CHAT, {}, engine))
    assert text_of(CHAT, parts[0]) == "h"
    assert last == {"error": "The engine is gone."}
    engine.fail_first = True
    answer = await send(CHAT, {}, engine)
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (
        503,
        {"error": "The engine is gone."},
        "2",
    )


async def test_waiting_stream_is_kept_alive_with_empty_lines_of_json() -> None:
    engine = FakeEngine("hello")
    engine.pause()
    config = Config(port=0, drain_timeout=1.0, keep_alive=0.05)
    async with (
        server(engine, config, plain_model()) as http,
        http.stream("POST", CHAT, json={"model": "fake", "messages": HI}) as response,
    ):
        found = response.aiter_lines()
        first = json.loads(await anext(found))
        engine.resume()
        rest = [json.loads(line) async for line in found]
    assert (text_of(CHAT, first), first["done"]) == ("", False)
    assert "".join(text_of(CHAT, line) for line in rest) == "hello"
    assert rest[-1]["done"]


async def test_disconnected_client_ends_the_generation() -> None:
    engine = FakeEngine("x" * 1000, delay=0.01)
    async with server(engine, model=plain_model()) as http:
        async with http.stream("POST", CHAT, json={"model": "fake", "messages": HI}) as response:
            await anext(response.aiter_lines())
        assert await eventually(lambda: not engine.running)
    assert engine.aborted


FORM = {"content-type": "application/x-www-form-urlencoded"}


BODY = json.dumps({"model": "fake", "messages": HI, "stream": False})


async def test_content_type_of_forms_or_none_is_accepted_unless_a_page_of_another_site_sends_it() -> None:
    async with client(FakeEngine("x"), model=plain_model()) as http:
        assert (await http.post(CHAT, content=BODY, headers=FORM)).status_code == 200
        assert (await http.post(CHAT, content=BODY)).status_code == 200  # as litellm does
        stream = {"content-type": "application/octet-stream"}  # as aiohttp does
        assert (await http.post(CHAT, content=BODY, headers=stream)).status_code == 200
        untyped = await http.post(CHAT, content=BODY, headers={"origin": "https://evil.example"})
        assert untyped.status_code == 403
        own = FORM | {"origin": "http://localhost:3000"}
        assert (await http.post(CHAT, content=BODY, headers=own)).status_code == 200
        foreign = await http.post(CHAT, content=BODY, headers=FORM | {"origin": "https://evil.example"})
        assert foreign.status_code == 403
        rebound = await http.post(CHAT, content=BODY, headers=FORM | {"host": "evil.example"})
        assert rebound.status_code == 403
        assert (await http.post("/v1/chat/completions", content=BODY, headers=FORM)).status_code == 415
        for path in ("/api/show", "/api/create", "/api/copy", "/api/pull"):
            answer = await http.post(path, content="{}", headers=FORM | {"origin": "https://evil.example"})
            assert answer.status_code == 403, path


async def test_content_type_of_forms_of_another_site_is_refused_with_keys_too() -> None:
    foreign = {"authorization": "Bearer k", "origin": "https://chat.example"}
    async with client(FakeEngine("x"), Config(api_key=("k",)), plain_model()) as http:
        refused = [await http.post(CHAT, content=BODY, headers=foreign | each) for each in (FORM, {})]
        assert [each.status_code for each in refused] == [403, 403]
        assert all("chat.example" in each.json()["error"] for each in refused)
        assert (await http.post(CHAT, content=BODY, headers={"authorization": "Bearer k"} | FORM)).status_code == 200
        typed = foreign | {"content-type": "application/json"}  # which a browser asks for first
        assert (await http.post(CHAT, content=BODY, headers=typed)).status_code == 200
        for path in ("/v1/models", "/api/tags"):
            assert (await http.get(path, headers=foreign)).status_code == 200
    allowed = Config(api_key=("k",), cors_origins=("https://chat.example",))
    async with client(FakeEngine("x"), allowed, plain_model()) as http:
        assert (await http.post(CHAT, content=BODY, headers=foreign | FORM)).status_code == 200


async def test_model_without_chat_template_is_refused() -> None:
    async with client(FakeEngine("x"), model=fake_model()) as http:  # without a chat template
        answer = await http.post(CHAT, json={"model": "fake", "messages": HI})
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]
