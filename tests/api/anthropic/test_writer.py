from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from syringa.api.anthropic.token_counts import TokenCounts
from syringa.api.anthropic.writer import MessageWriter
from syringa.events import Event, Finished, TextDelta, ToolCallDelta, ToolCallStart, Usage
from syringa.output.collect import collect
from tests.fake_engine import fake_model


def writer(**fields: Any) -> MessageWriter:
    return MessageWriter(id="msg_1", model=fake_model(), counts=TokenCounts(prompt_tokens=10), **fields)


def render(*events: Any, **fields: Any) -> Any:
    return json.loads(msgspec.json.encode(writer(**fields).render(collect([*events, Usage(10, 5)]))))


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "max_tokens"), (6, "model_context_window_exceeded")])
def test_writer_tells_a_full_context_from_max_tokens(max_tokens: int, reason: str) -> None:
    events = [TextDelta(0, "a"), Finished(0, "length")]
    assert render(*events, max_tokens=max_tokens)["stop_reason"] == reason
    streaming = writer(max_tokens=max_tokens)
    chunks = [chunk for event in (Usage(10, 0), *events, Usage(10, 5)) for chunk in streaming.write(event)]
    assert json.loads(msgspec.json.encode(chunks[-2]))["delta"]["stop_reason"] == reason


def test_writer_names_the_text_of_a_stop_token() -> None:
    message = render(TextDelta(0, "a"), Finished(0, "stop", ord("z")))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "z")


@pytest.mark.parametrize(
    ("arguments", "input"),
    [('{"a": 1e2, "b": 12345678901234567890123}', None), ("", {}), ('{"a": ', {}), ("[1]", {}), ('{"a": NaN}', {})],
)
def test_writer_keeps_the_input_as_it_was_written_if_it_is_an_object(arguments: str, input: Any) -> None:
    events: list[Event] = [
        ToolCallStart(0, 0, "call_1", "f"),
        ToolCallDelta(0, 0, arguments),
        Finished(0, "tool_calls"),
    ]
    body = msgspec.json.encode(writer().render(collect([*events, Usage(10, 5)]))).decode()
    if input is None:
        assert f'"input":{arguments}' in body
    else:
        assert json.loads(body)["content"][0]["input"] == input


def test_writer_joins_texts_around_nothing_and_separates_those_around_calls() -> None:
    message = render(
        TextDelta(0, "a"), TextDelta(0, "b"), ToolCallStart(0, 0, "call_1", "f"), Finished(0, "tool_calls")
    )
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert message["content"][0]["text"] == "ab"


def test_counts_add_the_tokens_of_images_before_the_mark() -> None:
    counts = TokenCounts(prompt_tokens=10, marked_tokens=8, marked_images=0.5)
    usage = counts.usage(Usage(110, 5, cached_tokens=20))
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens) == (20, 38, 52)
