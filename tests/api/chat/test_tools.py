"""Tests of tool calls in chat."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.chat.helpers import HI, post, prompt_of, refused
from tests.api.fields.test_tools import CALL, TOOLS, named
from tests.chat_models import NO_SYSTEM, plain_model, reasoning_model, tool_model
from tests.fake_engine import FakeEngine

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("model", "call"), [(plain_model(), CALL), (tool_model(), HERMES), (reasoning_model(), HERMES)]
)
@pytest.mark.parametrize("choice", [None, "auto", "required", named()])
async def test_chat_returns_tool_calls(model: Any, call: str, choice: Any) -> None:
    engine = FakeEngine(call)
    body = {"tools": TOOLS, "tool_choice": choice}
    whole = await post(body, engine, model=model)
    streamed = await post(
        body | {"stream": True, "stream_options": {"include_usage": True}}, FakeEngine(call, at_once=3), model=model
    )
    for answer in (whole, streamed):
        (found,) = answer["choices"]
        (call_,) = found["message"]["tool_calls"]
        assert call_.pop("id").startswith("call_")
        assert call_ == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
        assert found["message"]["content"] is None
        assert found["finish_reason"] == ("stop" if choice == named() else "tool_calls")
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert ("TEXT" in grammar.value) == (choice in (None, "auto"))


async def test_chat_prompt_describes_tools() -> None:
    prompt = await prompt_of({"tools": TOOLS}, model=tool_model())
    assert prompt.startswith('[tools]{"name": "weather"')
    assert prompt.endswith("[user]hi[assistant]")
    prompt = await prompt_of({"tools": TOOLS})
    assert prompt.startswith("[s]You can call these functions.")
    assert prompt.endswith("</tool_call>[u]hi[a]")
    prompt = await prompt_of({"tools": TOOLS, "messages": [{"role": "system", "content": "Be kind."}, *HI]})
    assert "plain text.\n\nBe kind.[u]" in prompt
    assert prompt.endswith("</tool_call>[u]hi[a]")
    prompt = await prompt_of({"tools": TOOLS}, model=plain_model(NO_SYSTEM))
    assert prompt.startswith("[u]You can call these functions.")
    assert prompt.endswith("</tool_call>[u]hi[a]")


@pytest.mark.parametrize("model", [plain_model(), tool_model()])
async def test_chat_tool_choice_none_hides_tools(model: Any) -> None:
    engine = FakeEngine(CALL)
    body = await post({"tools": TOOLS, "tool_choice": "none"}, engine, model=model)
    assert body["choices"][0]["message"]["content"] == CALL
    assert b"weather" not in bytes(engine.requests[0].prompt)
    assert engine.requests[0].sampling.grammar is None


async def test_chat_sets_call_opening_for_untrained_models() -> None:
    cases = [({}, plain_model()), ({"tool_choice": "required"}, plain_model()), ({}, tool_model())]
    openings = []
    for body, model in cases:
        engine = FakeEngine(CALL)
        await post({"tools": TOOLS} | body, engine, model=model)
        openings.append(bytes(engine.requests[0].sampling.opening))
    assert openings == [b"<tool_call>", b"", b""]


async def test_chat_parallel_tool_calls() -> None:
    engine = FakeEngine(CALL)
    for parallel in (None, True, False):
        await post({"tools": TOOLS, "parallel_tool_calls": parallel}, engine)
    grammars = [str(request.sampling.grammar) for request in engine.requests]
    assert grammars[0] == grammars[1] != grammars[2]


async def test_chat_combines_tools_and_response_format() -> None:
    engine = FakeEngine("{}")
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    for choice in ("auto", "required", "none"):
        await post({"tools": TOOLS, "tool_choice": choice, "response_format": shape}, engine)
    either, calls, text = (str(request.sampling.grammar) for request in engine.requests)
    assert "null" in either
    assert "weather" in either
    assert "null" not in calls
    assert "weather" in calls
    assert "weather" not in text
    error = await refused({"tools": TOOLS, "grammar": {"type": "regex", "value": "a"}})
    assert error["param"] == "grammar"


FENCED = '```json\n{\n  "name": "weather",\n  "arguments": {"city": "Rome"}\n}\n```'
ORDINARY = 'So:\n```json\n{"name": "Bob", "arguments": {}}\n```\nDone.'


@pytest.mark.parametrize("model", [plain_model(), tool_model(), reasoning_model()])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_returns_a_call_in_a_code_block_as_a_tool_call(model: Any, stream: bool) -> None:
    body = {"tools": TOOLS, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    (choice,) = (await post(body, FakeEngine(f"Well:\n{FENCED}"), model=model))["choices"]
    assert choice["message"]["content"] == "Well:\n"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = (await post(body, FakeEngine(ORDINARY), model=model))["choices"]
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (ORDINARY, [])


async def test_chat_takes_calls_in_code_blocks_only_of_tools_that_may_be_called() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    body = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    (choice,) = (await post(body, FakeEngine(FENCED), model=tool_model()))["choices"]
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (FENCED, [])


@pytest.mark.parametrize("call", [HERMES, FENCED, f"{HERMES}\n{HERMES}"])
@pytest.mark.parametrize("at_once", [1, 1000])
async def test_chat_ends_where_text_follows_a_tool_call(call: str, at_once: int) -> None:
    engine = FakeEngine(f"{call}\nThis calls a function.", at_once=at_once)
    body = await post({"tools": TOOLS, "logprobs": True, "return_token_ids": True}, engine, model=tool_model())
    (choice,) = body["choices"]
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == call.count("{\n") + call.count('{"name"')
    assert choice["finish_reason"] == "tool_calls"
    # What follows the call is neither returned nor counted, however much of it the engine had generated.
    assert body["usage"]["completion_tokens"] == len(call.encode())
    assert bytes(choice["token_ids"]).decode() == call
    assert len(choice["logprobs"]["content"]) == len(call.encode())
    assert bool(engine.aborted) == (at_once == 1)


async def test_chat_returns_whitespace_after_no_call() -> None:
    (choice,) = (await post({"tools": TOOLS}, FakeEngine(" \n"), model=tool_model()))["choices"]
    assert choice["message"]["content"] == " \n"
