"""`/v1/messages` with wrong values in every field: each request is answered, none with an internal error."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.api.decoding import MAX_DEPTH
from tests.chat_models import reasoning_model, tool_model, vision_model
from tests.fake_engine import FakeEngine
from tests.http.anthropic_client import (
    ASKED,
    CALLED,
    IMAGE,
    PATH,
    TOOL,
    AnthropicClient,
    anthropic_client,
    check_error,
    parse_stream,
)
from tests.tiers import SLOW

EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}


def nested(depth: int, kind: type) -> Any:
    """Return arrays or objects inside of each other."""
    value: Any = "x"
    for _ in range(depth):
        value = [value] if kind is list else {"content": value}
    return value


WRONG: list[Any] = [
    *(None, True, 0, -1, 1e308, 2**70, "", "\0", "\ud7ff" * 200, [], {}, [None], [[]], {"": {}}),
    *({"type": "text"}, {"type": []}, {"type": "tool_result"}, [{"type": "image", "source": 5}]),
    *(nested(MAX_DEPTH - 20, list), nested(MAX_DEPTH - 20, dict)),
]
MISSING = object()


def text_body(thinking: dict[str, Any]) -> dict[str, Any]:
    """Return a valid body with blocks of all kinds that have no image."""
    texts = [{"type": "text", "text": "a", "cache_control": EPHEMERAL, "citations": []}]
    document = {
        "type": "document",
        "source": {"type": "content", "content": texts},
        "title": "t",
        "context": "c",
        "citations": {"enabled": True},
    }
    found = {"type": "search_result", "source": "s", "title": "t", "content": texts, "citations": {"enabled": False}}
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    redacted = {"type": "redacted_thinking", "data": thinking["signature"]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "cache_control": EPHEMERAL}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}, "cache_control": EPHEMERAL},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}},
    ]
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    return {
        "model": "fake",
        "max_tokens": 20,
        "system": texts,
        "messages": [
            {"role": "user", "content": [*texts, document, plain, found]},
            {"role": "system", "content": texts},
            {"role": "assistant", "content": [thinking, redacted, *texts, CALLED | {"caller": {"type": "direct"}}]},
            {"role": "user", "content": [result | {"content": [*texts, document, found, reference]}]},
            {"role": "system", "content": changes, "output_config": {"effort": "low"}},
            {"role": "user", "content": [{"type": "compaction", "content": "c", "tool_changes": changes}]},
        ],
        "tools": [
            TOOL
            | {
                "type": "custom",
                "strict": True,
                "input_examples": [{"city": "Rome"}],
                "defer_loading": False,
                "allowed_callers": ["direct"],
                "eager_input_streaming": True,
                "cache_control": EPHEMERAL,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "cache_control": EPHEMERAL,
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": False,
        "service_tier": "auto",
        "speed": "standard",
        "context_management": {"edits": []},
    }


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*at, key)
        yield from paths(each, (*at, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result: Any = copy.deepcopy(body)
    *outer, last = path
    inner = result
    for key in outer:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return result  # type: ignore[no-any-return]


async def check_all(http: AnthropicClient, body: dict[str, Any]) -> set[int]:
    """Send the body with every wrong value in every place. Return the statuses."""
    cases = [(path, value) for path in paths(body) for value in (MISSING, *WRONG)]
    statuses = set()
    for path, value in cases if SLOW else cases[::41]:  # all values and all paths have their turn
        answer = await http.post(PATH, json=changed(body, path, value))
        assert answer.status_code in (200, 400, 404), (path, str(value)[:80], answer.text)
        if answer.status_code != 200:
            assert len(check_error(answer)["message"]) < 2000
        statuses.add(answer.status_code)
    return statuses


async def test_wrong_values_in_a_conversation_are_refused(tmp_path: Path) -> None:
    engine = FakeEngine("<think>Let me see.</think>Yes.")
    async with anthropic_client(engine, model=reasoning_model(), database=str(tmp_path / "db")) as http:
        thinking, _ = (await http.create(thinking={"type": "adaptive"}))["content"]
        body = text_body(thinking)
        assert (await http.post(PATH, json=body)).status_code == 200
        assert await check_all(http, body) >= {200, 400}


async def test_wrong_values_around_images_are_refused() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]}
    body = {
        "max_tokens": 20,
        "messages": [
            {"role": "user", "content": [IMAGE]},
            {"role": "assistant", "content": [CALLED]},
            {"role": "user", "content": [result, {"type": "text", "text": "Which?"}]},
        ],
    }
    async with anthropic_client(model=vision_model()) as http:
        assert (await http.post(PATH, json=body)).status_code == 200
        assert await check_all(http, body) >= {200, 400}


@pytest.mark.parametrize(
    "place",
    [
        {"messages": [*ASKED, {"role": "assistant", "content": [CALLED | {"input": nested(400, dict)}]}, *ASKED]},
        {"messages": nested(400, list)},
        {"system": nested(400, list)},
        {"tools": [TOOL | {"input_schema": {"properties": nested(400, dict)}}]},
        {
            "tools": [
                TOOL | {"input_schema": {"type": "object", "properties": {"a": nested(400, dict)}}, "strict": True}
            ]
        },
        {"tools": [TOOL | {"input_examples": [nested(400, dict)]}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"properties": {"a": nested(400, dict)}}}}},
        {"metadata": nested(400, dict)},
        {"thinking": {"type": "adaptive", "x": nested(400, list)}},
        {"unknown": nested(400, dict)},
    ],
)
async def test_deep_nesting_is_answered(place: dict[str, Any]) -> None:
    async with anthropic_client(model=tool_model()) as http:
        for path in (PATH, f"{PATH}/count_tokens"):
            answer = await http.send_body(path, **place)
            assert answer.status_code in (200, 400), answer.text
        deeper = {"x": nested(MAX_DEPTH + 1, list)}
        assert (await http.error(400, **place, **deeper))["message"] == "The body is nested too deeply."


async def test_long_lists_of_blocks_do_not_hold_up_other_requests() -> None:
    """They are read in a thread, wherever they are."""
    texts = [{"type": "text", "text": ""}] * 300
    source = {"type": "content", "content": texts}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": texts}
    calls = [*ASKED, {"role": "assistant", "content": [CALLED]}]
    bodies: list[dict[str, Any]] = [
        {"system": texts},
        {"messages": [{"role": "user", "content": texts}]},
        {"messages": ASKED * 300},
        {"messages": [*calls, {"role": "user", "content": [result]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]},
    ]
    threads = 0
    in_thread = asyncio.to_thread

    async def count(function: Any, *arguments: Any, **fields: Any) -> Any:
        nonlocal threads
        threads += function.__qualname__ == "_Reader.read"
        return await in_thread(function, *arguments, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syringa.api.anthropic.messages.asyncio.to_thread", count)
        async with anthropic_client(model=tool_model()) as http:
            for body in bodies:
                await http.create(**body)
            assert threads == len(bodies)
            await http.create()
    assert threads == len(bodies)


async def test_text_of_clients_does_not_break_the_framing_of_a_stream() -> None:
    text = "a\n\nevent: error\ndata: {}\r\n\r\n\u2028\u2029\x85\0"
    async with anthropic_client(FakeEngine(text, at_once=3)) as http:
        answer = await http.send_body(stream=True, system=text, stop_sequences=["\n\n\n"], max_tokens=500)
    events = parse_stream(answer.text)
    parts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(parts) == text


async def test_names_of_unknown_fields_cannot_add_headers() -> None:
    async with anthropic_client() as http:
        answer = await http.post(PATH, json={"messages": ASKED, "max_tokens": 5, "x\r\nset-cookie: a": 1, "é, b": 2})
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-syringa-ignored"] == "x\\r\\nset-cookie: a, \\xe9\\x2c b"
