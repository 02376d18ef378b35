"""Tests of the reasoning fields."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.types import Grammar
from tests.api.chat.helpers import post, prompt_of, refused, send
from tests.chat_models import OPENING, reasoning_model
from tests.fake_engine import ByteTokenizer, FakeEngine


async def test_reasoning_is_separate_from_content() -> None:
    for script, model in [
        ("<think>\nHm.\n</think>\n\nhello", reasoning_model()),
        ("Hm.\n</think>\n\nhello", reasoning_model(OPENING)),
    ]:
        body = await post({}, FakeEngine(script), model=model)
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning"].strip()) == ("hello", "Hm.")
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    body = await post({}, FakeEngine("hello"), model=reasoning_model())
    assert "reasoning" not in body["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "[effort free][assistant]<think>"),
        ({"chat_template_kwargs": {"thinking": False}}, "[effort free][assistant]</think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[effort free][assistant]</think>"),
        ({"chat_template_kwargs": {"thinking": None}}, "[effort free][assistant]<think>"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "[effort free][assistant]<think>"),
        ({"reasoning_effort": "none"}, "[effort free][assistant]</think>"),
        ({"reasoning_effort": "high"}, "[effort high][assistant]<think>"),
        ({"chat_template_kwargs": {"reasoning_effort": "dire"}}, "[effort dire][assistant]<think>"),
    ],
)
async def test_template_gets_reasoning_switches_and_effort(fields: dict[str, Any], prompt: str) -> None:
    assert await prompt_of(fields, model=reasoning_model(OPENING)) == "[user]hi" + prompt


async def test_effort_becomes_budget_without_template_variable() -> None:
    for effort, budget in [("minimal", 256), ("low", 1024), ("medium", 4096), ("high", None), ("xhigh", None)]:
        engine = FakeEngine("x")
        answer = await send({"reasoning_effort": effort}, engine, model=reasoning_model())
        assert "x-syringa-ignored" not in answer.headers
        grammar = engine.requests[0].sampling.grammar
        assert (grammar is None) == (budget is None)
        assert grammar is None or f"max_tokens={budget}]" in grammar.value
    await post({"reasoning_effort": "low", "thinking_token_budget": 7}, engine, model=reasoning_model())
    assert "max_tokens=7]" in str(engine.requests[-1].sampling.grammar)


async def test_effort_is_ignored_if_reasoning_cannot_be_closed() -> None:
    model = reasoning_model(tokenizer=ByteTokenizer())
    answer = await send({"reasoning_effort": "low"}, model=model)
    assert answer.headers["x-syringa-ignored"] == "reasoning_effort"
    assert "x-syringa-ignored" not in (await send({"reasoning_effort": "high"}, model=model)).headers
    assert (await refused({"thinking_token_budget": 5}, model=model))["param"] == "thinking_token_budget"


async def test_reasoning_opened_by_prompt_is_closed_if_turned_off() -> None:
    engine = FakeEngine("x")
    source = "{{ messages[0].content }}<think>"
    await post({"reasoning_effort": "none"}, engine, model=reasoning_model(source))
    assert "reasoning: <[2]>" in str(engine.requests[0].sampling.grammar)


async def test_model_without_reasoning_reports_ignored_fields() -> None:
    body = {
        "reasoning_effort": "low",
        "thinking_token_budget": 5,
        "chat_template_kwargs": {"thinking": True, "mood": "merry"},
    }
    answer = await send(body)
    assert answer.headers["x-syringa-ignored"].split(", ") == [
        "chat_template_kwargs.mood",
        "chat_template_kwargs.thinking",
        "reasoning_effort",
        "thinking_token_budget",
    ]
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}):
        assert "x-syringa-ignored" not in (await send(off)).headers


async def test_response_format_does_not_constrain_reasoning() -> None:
    engine = FakeEngine("x")
    await post({"response_format": {"type": "json_object"}}, engine, model=reasoning_model())
    assert "REASONING" in str(engine.requests[0].sampling.grammar)
    await post({"response_format": {"type": "json_object"}}, engine)
    assert engine.requests[1].sampling.grammar == Grammar("json_schema", '{"type":"object"}')
