"""Invalid chat requests: a 400 that names the field, before anything reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.chat.helpers import refused
from tests.chat_models import NO_SYSTEM, plain_model
from tests.client import client
from tests.fake_engine import FakeEngine

CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def calling(**fields: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [call | fields]}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


INVALID: list[tuple[dict[str, Any], str]] = [
    *[({"messages": value}, "messages") for value in (None, [], {}, "hi", 5)],
    *[({"messages": [value]}, "messages[0]") for value in ("hi", 5, [])],
    *[({"messages": [value]}, "messages[0]") for value in ({}, {"content": "x"})],
    *[({"messages": [{"role": role, "content": "x"}]}, "messages[0].role") for role in (5, "a b", "function", [])],
    *[
        ({"messages": [{"role": role, "content": value}]}, "messages[0].content")
        for role in ("system", "developer", "user", "assistant")
        for value in (None, 5, {}, [])
    ],
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (user("x"), "messages[0].content[0]"),
    (user({"text": "x"}), "messages[0].content[0].type"),
    (user({"type": "text"}), "messages[0].content[0]"),
    (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": {}}), "messages[0].content[1].type"),
    (user({"type": "file", "file": {}}), "messages[0].content[0].type"),
    (user({"type": "refusal", "refusal": "no"}), "messages[0].content[0].type"),
    (user({"type": "image_url"}), "messages[0].content[0].image_url"),
    (user({"type": "image_url", "image_url": "http://x"}), "messages[0].content[0].image_url"),
    (user({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url"),
    (user({"type": "image_url", "image_url": {"url": 5}}), "messages[0].content[0].image_url.url"),
    (
        user({"type": "image_url", "image_url": {"url": "x", "detail": "most"}}),
        "messages[0].content[0].image_url.detail",
    ),
    (user({"type": "image_url", "image_url": {"url": "http://x"}}), "messages[0].content[0]"),
    (
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [calling(id=5)]}, "messages[0].tool_calls[0].id"),
    ({"messages": [calling(id=None)]}, "messages[0].tool_calls[0]"),
    ({"messages": [calling(type="custom")]}, "messages[0].tool_calls[0].type"),
    ({"messages": [calling(function=None)]}, "messages[0].tool_calls[0].function"),
    ({"messages": [calling(function={"name": "f"})]}, "messages[0].tool_calls[0].function"),
    *[
        (
            {"messages": [calling(function={"name": "f", "arguments": text})]},
            "messages[0].tool_calls[0].function.arguments",
        )
        for text in ("{", "[]", "5", "null", "[" * 100_000, {}, 5)
    ],
    ({"messages": [{"role": "assistant", "content": "x", "refusal": 5}]}, "messages[0].refusal"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning": []}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [CALLING, {"role": "tool", "content": "x"}]}, "messages[1]"),
    ({"messages": [CALLING, {"role": "tool", "content": "x", "tool_call_id": "d"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}, CALLING]}, "messages[0].tool_call_id"),
    ({"messages": [CALLING, {"role": "tool", "tool_call_id": "c"}]}, "messages[1].content"),
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "5", True, 10**30)],
    *[({"max_completion_tokens": value}, "max_completion_tokens") for value in (0, -1, 1.5, "5", True, 10**30)],
    *[({"temperature": value}, "temperature") for value in ("x", True, [], -0.1, 2.1)],
    *[({"n": value}, "n") for value in (0, 129, 1.5, "1", True)],
    *[({"logprobs": value}, "logprobs") for value in (1, "true", 0)],
    *[({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, "1", 1.5, True)],
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"logit_bias": {"258": 1}}, "logit_bias.258"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"grammar": {"type": "regex", "value": "("}}, "grammar.value"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    *[({"chat_template_kwargs": value}, "chat_template_kwargs") for value in ([], "x", 5)],
    *[({"chat_template_kwargs": {name: 1}}, "chat_template_kwargs") for name in ("messages", "tools")],
    *[
        ({"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}")
        for name in ("thinking", "enable_thinking")
        for value in ("no", 0, {})
    ],
    *[({"reasoning_effort": value}, "reasoning_effort") for value in ("most", 5, True, "None")],
    ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "reasoning_effort"),
    *[({"thinking_token_budget": value}, "thinking_token_budget") for value in (-2, 1.5, "5", True)],
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"user": 5}, "user"),
    *[({"safety_identifier": value}, "safety_identifier") for value in (5, "x" * 65)],
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {"a": None}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"k" * 65: "x"}}, "metadata." + "k" * 65),
    ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
    *[({"store": value}, "store") for value in (True, 1, "false")],
    ({"service_tier": "first"}, "service_tier"),
    ({"verbosity": 5}, "verbosity"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"modalities": "text"}, "modalities"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"moderation": {}}, "moderation"),
    ({"functions": []}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=lambda value: str(value)[:60])
async def test_chat_rejects_invalid_field(fields: dict[str, Any], param: str) -> None:
    error = await refused(fields)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


async def test_chat_names_alternative_of_unsupported_field() -> None:
    for field, expected in [("functions", "tools"), ("store", "/v1/responses"), ("audio", "not supported")]:
        assert expected in (await refused({field: True if field == "store" else {}}))["message"]


async def test_chat_reports_refusal_of_template() -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    error = await refused({"messages": messages}, model=plain_model(NO_SYSTEM))
    assert error["param"] == "messages"
    assert "no system" in error["message"]


async def test_chat_accepts_python_names_and_rejects_line_breaks_in_names() -> None:
    async with client(FakeEngine("x"), model=plain_model()) as http:
        hi = [{"role": "user", "content": "hi"}]
        body = {"messages": hi, "chat_template_kwargs": {"self": 1}}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        tool = {"type": "function", "function": {"name": "ab\n"}}
        answer = await http.post("/v1/chat/completions", json={"messages": hi, "tools": [tool]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.name")


async def test_chat_refuses_more_choices_than_the_server_allows() -> None:
    error = await refused({"n": 5}, model=plain_model(max_choices=4))
    assert (error["param"], error["message"]) == (
        "n",
        "n: 5 choices are 5; this server allows 4 per request (max_choices).",
    )
