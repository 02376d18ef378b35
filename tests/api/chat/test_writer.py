from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.api.chat.writer import ChatWriter
from syringa.events import Event, Finished, ReasoningDelta, ScoredToken, TextDelta, ToolCallDelta, ToolCallStart, Usage
from syringa.output.collect import collect
from syringa.types import TokenLogprobs
from tests.api.chat.chatting import reassemble
from tests.fake_engine import END, fake_model
from tests.schemas import validate


def writer(**fields: Any) -> ChatWriter:
    return ChatWriter(**{"id": "chatcmpl-1", "created": 1, "model": fake_model(), "include_usage": True, **fields})


def streamed(told: list[Event], **fields: Any) -> list[Any]:
    write = writer(**fields).write
    return [json.loads(msgspec.json.encode(chunk)) for event in told for chunk in write(event)]


def whole(told: list[Event], **fields: Any) -> dict[str, Any]:
    generation = collect(told)
    body = json.loads(msgspec.json.encode(writer(**fields).render(generation)))
    validate(body, "CreateChatCompletionResponse")
    return body


TOLD: list[Event] = [
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


def test_the_body() -> None:
    body = whole(TOLD)
    first, second = body["choices"]
    assert first["message"] == {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "tool_calls": [call("call_1", "f", '{"x": 1}'), call("call_2", "g", "{}")],
        "reasoning": "Let me see.",
    }
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "length")
    assert second["message"] == {"role": "assistant", "content": "No", "refusal": None, "tool_calls": []}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_the_stream() -> None:
    chunks = streamed(TOLD)
    deltas = [(part["index"], part["delta"]) for chunk in chunks for part in chunk["choices"]]
    assert deltas[:5] == [
        (0, {"role": "assistant", "content": ""}),
        (0, {"reasoning": "Let me "}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "No"}),
        (0, {"reasoning": "see."}),
    ]
    start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert (0, {"tool_calls": [start]}) in deltas
    assert (0, {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]}) in deltas
    assert deltas[-1] == (0, {})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 14
    assert reassemble([*chunks, "[DONE]"]) == whole(TOLD)


def test_a_named_function_ends_with_stop() -> None:
    body = whole(TOLD, named_tool=True)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert reassemble([*streamed(TOLD, named_tool=True), "[DONE]"]) == body


def test_content_is_null_beside_calls_alone() -> None:
    told = [ToolCallStart(0, 0, "call_1", "f"), ToolCallDelta(0, 0, "{}"), Finished(0, "tool_calls"), Usage(1, 1)]
    assert whole(told)["choices"][0]["message"]["content"] is None
    assert whole([Finished(0, "length"), Usage(1, 0)])["choices"][0]["message"]["content"] == ""


def test_an_empty_choice_still_begins() -> None:
    chunks = streamed([Finished(0, "stop"), Usage(1, 1)])
    assert [part["delta"] for chunk in chunks for part in chunk["choices"]] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_without_usage_there_is_none() -> None:
    chunks = streamed(TOLD, include_usage=False)
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


texts = st.text("aé😀 \n", min_size=1, max_size=3)
tokens = st.lists(
    st.builds(lambda id_: ScoredToken(TokenLogprobs(id_, -1.5, [(id_, -1.5), (97, -2.0)]), 0), st.integers(0, END)),
    max_size=2,
)


@st.composite
def generations(draw: st.DrawFn) -> list[Event]:
    """Any order of events that a generation may have."""
    left = {index: draw(st.integers(0, 6)) for index in range(draw(st.integers(1, 3)))}
    calls = dict.fromkeys(left, 0)
    told: list[Event] = []
    while left:
        index = draw(st.sampled_from(sorted(left)))
        if not left[index]:
            del left[index]
            told.append(Finished(index, draw(st.sampled_from(["stop", "length", "tool_calls"]))))
            continue
        left[index] -= 1
        kind = draw(st.sampled_from(["text", "thought", "call", "arguments"]))
        if kind == "text":
            told.append(TextDelta(index, draw(texts), draw(tokens)))
        elif kind == "thought":
            told.append(ReasoningDelta(index, draw(texts)))
        elif kind == "call" or not calls[index]:
            told.append(ToolCallStart(index, calls[index], f"call_{calls[index]}", "f"))
            calls[index] += 1
        else:
            told.append(ToolCallDelta(index, calls[index] - 1, draw(texts)))
    return [*told, Usage(3, draw(st.integers(0, 9)), 1, 1)]


@given(told=generations(), logprobs=st.booleans())
def test_any_stream_makes_the_body(told: list[Event], logprobs: bool) -> None:
    if not logprobs:
        told = [msgspec.structs.replace(each, tokens=[]) if isinstance(each, TextDelta) else each for each in told]
    body = whole(told, logprobs=logprobs)
    assert reassemble([*streamed(told, logprobs=logprobs), "[DONE]"], logprobs=logprobs) == body


@pytest.mark.parametrize("fields", [{}, {"metadata": {"a": "b"}}])
def test_metadata_comes_back(fields: dict[str, Any]) -> None:
    assert (whole(TOLD, **fields)).get("metadata") == fields.get("metadata")
