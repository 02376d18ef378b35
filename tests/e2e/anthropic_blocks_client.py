"""Thinking, images and beta blocks with Anthropic's official package. It runs in its environment.

python anthropic_blocks_client.py URL KEY MODEL

The model is a fake one that thinks, answers and calls `get_weather`, whatever it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import pydantic
from anthropic import types
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_params
from anthropic_messages_client import ASKED, TOOL, assert_no_extra, body, client, messages, post
from client_checks import run_checks

# A white pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsx2fGgAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
OTHER = {**TOOL, "name": "get_time"}
SHOWN, OMITTED = {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "omitted"}
REQUEST = pydantic.TypeAdapter(message_create_params.MessageCreateParamsNonStreaming)
BETA_REQUEST = pydantic.TypeAdapter(beta_params.MessageCreateParamsNonStreaming)
EVENT = pydantic.TypeAdapter(types.RawMessageStreamEvent)


def think(thinking, **fields):
    """Return the fields of a request that fits what the model writes. Thinking does not allow a temperature."""
    sent = body(thinking=thinking, tools=[TOOL], max_tokens=2000, **fields)
    del sent["extra_body"]
    return sent


def validate_request(adapter, fields):
    """Check that a request is one that the package's types allow: they validate lists when they are read."""
    read_all(adapter.validate_python(fields))


def read_all(value):
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for each in value:
            read_all(each)


def check_thinking_and_signatures_are_valid_for_the_types() -> None:
    for thinking in (SHOWN, OMITTED):
        message = types.Message.model_validate_json(post(**think(thinking), extra_body={}))
        assert_no_extra(message)
        first, *_, last = message.content
        assert (first.type, last.type) == ("thinking", "tool_use")
        assert bool(first.thinking) == (thinking is SHOWN)
        assert len(first.signature) > 20
        assert message.usage.output_tokens_details.thinking_tokens > 5


def check_events_of_thinking_are_valid_for_the_types() -> None:
    for thinking in (SHOWN, OMITTED):
        lines = post(**think(thinking), extra_body={"stream": True}).splitlines()
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        events = [EVENT.validate_python(event) for event in found if event["type"] != "ping"]
        assert_no_extra(events)
        kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
        wanted = ["thinking_delta"] if thinking is SHOWN else []
        assert list(dict.fromkeys(kinds)) == [*wanted, "signature_delta", "text_delta", "input_json_delta"], kinds
        assert kinds.count("signature_delta") == 1


def check_a_stream_of_thinking_makes_the_same_blocks() -> None:
    whole = messages.create(**think(SHOWN))
    with messages.stream(**think(SHOWN)) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(events)
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.content[0].thinking == whole.content[0].thinking
    assert final.content[0].signature
    assert final.content[-1].input == whole.content[-1].input == {"city": "Paris"}


def check_thinking_and_images_are_sent_back() -> None:
    asked = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?"}]}]
    called = messages.create(**think(SHOWN, messages=asked))
    result = {
        "type": "tool_result",
        "tool_use_id": called.content[-1].id,
        "content": [IMAGE, {"type": "text", "text": "a pixel"}],
    }
    content = [block.model_dump(exclude_none=True) for block in called.content]
    turns = [*asked, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    fields = think(OMITTED, messages=turns)
    validate_request(REQUEST, fields)
    omitted = messages.create(**fields).content[0]
    assert omitted.thinking == ""
    redacted = {"type": "redacted_thinking", "data": omitted.signature}
    turns = [*turns, {"role": "assistant", "content": [omitted, redacted]}, *ASKED]
    assert messages.create(**think(SHOWN, messages=turns)).stop_reason == "tool_use"


def check_beta_blocks_are_read_or_named() -> None:
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": OTHER}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_time"}},
        {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "server_name": "s"}},
        {"type": "text", "text": "Be brief."},
    ]
    listing = {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []}
    asked = [
        *ASKED,
        {"role": "system", "content": changes},
        {"role": "assistant", "content": [{"type": "compaction", "content": "Lilacs."}, listing]},
        *ASKED,
        {"role": "system", "content": [], "output_config": {"effort": "low"}},
    ]
    fields = think({"type": "adaptive", "display": "updates"}, messages=asked)
    validate_request(BETA_REQUEST, fields)
    raw = client.beta.messages.with_raw_response.create(**fields, betas=["inline-tools-2026-09-15"])
    assert raw.headers["x-syringa-ignored"].split(", ") == [
        "messages[1].content[2] (tool_addition)",
        "messages[2].content[1] (mcp_tool_listing)",
        "messages[4].output_config",
        "thinking.display",
    ]
    assert_no_extra(raw.parse())


if __name__ == "__main__":
    run_checks(globals())
