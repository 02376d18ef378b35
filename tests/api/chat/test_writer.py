"""Tests of the chat writer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.api.chat.writer import ChatWriter
from syringa.events import Event, Finished, ReasoningDelta, ScoredToken, TextDelta, ToolCallDelta, ToolCallStart, Usage
from syringa.output.collect import collect
from syringa.types import TokenLogprobs
from tests.api.chat.helpers import reassemble
from tests.fake_engine import END, fake_model
from tests.schemas import validate_openai


def writer(**fields: Any) -> ChatWriter:
    return ChatWriter(**{"id": "chatcmpl-1", "created": 1, "model": fake_model(), "include_usage": True, **fields})


def streamed(events: list[Event], **fields: Any) -> list[Any]:
    write = writer(**fields).write
    return [json.loads(msgspec.json.encode(chunk)) for event in events for chunk in write(event)]


def whole(events: list[Event], **fields: Any) -> dict[str, Any]:
    generation = collect(events)
    body = json.loads(msgspec.json.encode(writer(**fields).render(generation)))
    validate_openai(body, "CreateChatCompletionResponse")
    return body


EVENTS: list[Event] = [
    ReasoningDelta(0, "Let me "),
    TextDelta(1, "No"),
    ReasoningDelta(0, "see."),
    TextDelta(0, "Hi"),
    Finished(1, "length"),
    ToolCallStart(0, 0, "call_1", "f"),
    ToolCallDelta(0, 0, '{"x"'),
    ToolCallDelta(0, 0, ": 1}"),
    ToolCallStart(0, 1, "call_2", "g"),
    ToolCallDelta(0, 1, "{}"),
    Finished(0, "tool_calls"),
    Usage(5, 9, 3, 2),
]


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_chat_writer_renders_body() -> None:
    body = whole(EVENTS)
    first, second = body["choices"]
    assert first["message"] == {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "tool_calls": [call("call_1", "f", '{"x": 1}'), call("call_2", "g", "{}")],
        "reasoning": "Let me see.",
        "reasoning_content": "Let me see.",
    }
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "length")
    assert second["message"] == {
        "role": "assistant",
        "content": "No",
        "refusal": None,
        "annotations": [],
        "tool_calls": [],
    }
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_chat_writer_writes_chunks() -> None:
    chunks = streamed(EVENTS)
    deltas = [(part["index"], part["delta"]) for chunk in chunks for part in chunk["choices"]]
    assert deltas[:5] == [
        (0, {"role": "assistant", "reasoning": "Let me ", "reasoning_content": "Let me "}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "No"}),
        (0, {"reasoning": "see.", "reasoning_content": "see."}),
        (0, {"content": "Hi"}),
    ]
    start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert (0, {"tool_calls": [start]}) in deltas
    assert (0, {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]}) in deltas
    assert deltas[-1] == (0, {})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 14
    assert reassemble([*chunks, "[DONE]"]) == whole(EVENTS)


def test_chat_writer_finishes_named_function_with_stop() -> None:
    body = whole(EVENTS, named_tool=True)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert reassemble([*streamed(EVENTS, named_tool=True), "[DONE]"]) == body


def test_chat_writer_content_is_null_with_calls_only() -> None:
    events = [ToolCallStart(0, 0, "call_1", "f"), ToolCallDelta(0, 0, "{}"), Finished(0, "tool_calls"), Usage(1, 1)]
    assert whole(events)["choices"][0]["message"]["content"] is None
    assert whole([Finished(0, "length"), Usage(1, 0)])["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("before", [[], [ReasoningDelta(0, "hm")]])
def test_chat_writer_streams_a_call_without_an_empty_content_before_it(before: list[Event]) -> None:
    call = ToolCallStart(0, 0, "call_1", "f")
    events = [*before, call, ToolCallDelta(0, 0, "{}"), Finished(0, "tool_calls"), Usage(1, 1)]
    chunks = streamed(events)
    deltas = [part["delta"] for chunk in chunks for part in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert all(delta.get("content") is None for delta in deltas)
    if not before:
        assert deltas[0].keys() == {"role", "content", "tool_calls"}
    assert reassemble([*chunks, "[DONE]"]) == whole(events)


def test_chat_writer_streams_logprobs_of_a_call_without_content() -> None:
    token = ScoredToken(TokenLogprobs(97, -1.0), 0)
    events: list[Event] = [TextDelta(0, "", [token]), ToolCallStart(0, 0, "call_1", "f"), Finished(0, "tool_calls")]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(events, logprobs=True)]
    assert deltas[0] == {"role": "assistant"}
    assert not any("content" in delta for delta in deltas)


@pytest.mark.parametrize("only", ["reasoning", "reasoning_content"])
def test_chat_writer_returns_reasoning_in_the_configured_field(only: Any) -> None:
    model = replace(fake_model(), reasoning_fields=only)
    events: list[Event] = [ReasoningDelta(0, "hm"), TextDelta(0, "Hi"), Finished(0, "stop"), Usage(1, 1)]
    body = whole(events, model=model)
    names = body["choices"][0]["message"].keys() & {"reasoning", "reasoning_content"}
    assert names == {only}
    assert reassemble([*streamed(events, model=model), "[DONE]"]) == body


def test_chat_writer_repeats_the_fingerprint_of_the_model() -> None:
    model = replace(fake_model(), system_fingerprint="fp_1")
    assert whole(EVENTS, model=model)["system_fingerprint"] == "fp_1"
    assert {chunk["system_fingerprint"] for chunk in streamed(EVENTS, model=model)} == {"fp_1"}


def test_chat_writer_starts_an_empty_choice() -> None:
    chunks = streamed([Finished(0, "stop"), Usage(1, 1)])
    assert [part["delta"] for chunk in chunks for part in chunk["choices"]] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_chat_writer_without_usage() -> None:
    chunks = streamed(EVENTS, include_usage=False)
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


texts = st.text("aé😀 \n", min_size=1, max_size=3)
tokens = st.lists(
    st.builds(lambda id_: ScoredToken(TokenLogprobs(id_, -1.5, [(id_, -1.5), (97, -2.0)]), 0), st.integers(0, END)),
    max_size=2,
)


@st.composite
def generations(draw: st.DrawFn) -> list[Event]:
    """Generate any valid order of events."""
    left = {index: draw(st.integers(0, 6)) for index in range(draw(st.integers(1, 3)))}
    calls = dict.fromkeys(left, 0)
    events: list[Event] = []
    while left:
        index = draw(st.sampled_from(sorted(left)))
        if not left[index]:
            del left[index]
            events.append(Finished(index, draw(st.sampled_from(["stop", "length", "tool_calls"]))))
            continue
        left[index] -= 1
        kind = draw(st.sampled_from(["text", "reasoning", "call", "arguments"]))
        if kind == "text":
            events.append(TextDelta(index, draw(texts), draw(tokens)))
        elif kind == "reasoning":
            events.append(ReasoningDelta(index, draw(texts)))
        elif kind == "call" or not calls[index]:
            events.append(ToolCallStart(index, calls[index], f"call_{calls[index]}", "f"))
            calls[index] += 1
        else:
            events.append(ToolCallDelta(index, calls[index] - 1, draw(texts)))
    return [*events, Usage(3, draw(st.integers(0, 9)), 1, 1)]


@given(events=generations(), logprobs=st.booleans())
def test_chat_writer_stream_equals_body(events: list[Event], logprobs: bool) -> None:
    if not logprobs:
        events = [msgspec.structs.replace(each, tokens=[]) if isinstance(each, TextDelta) else each for each in events]
    body = whole(events, logprobs=logprobs)
    assert reassemble([*streamed(events, logprobs=logprobs), "[DONE]"], logprobs=logprobs) == body


@pytest.mark.parametrize("fields", [{}, {"metadata": {"a": "b"}}])
def test_chat_writer_returns_metadata(fields: dict[str, Any]) -> None:
    assert (whole(EVENTS, **fields)).get("metadata") == fields.get("metadata")
