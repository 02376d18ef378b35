"""Streams of `/v1/messages`, thinking blocks with their signatures, and the counts of cached tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.config import Config
from syringa.errors import EngineUnavailable
from tests.chat_models import plain_model, reasoning_model, tool_model
from tests.client import server
from tests.fake_engine import ByteTokenizer, FakeEngine
from tests.http.anthropic_client import ASKED, CALLED, PATH, TOOL, anthropic_client, fold, parse_stream

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 1.50}}\n</tool_call>'
THOUGHT = "<think>Let me see.</think>Yes."
ENABLED = {"type": "enabled", "budget_tokens": 2000}
EPHEMERAL = {"type": "ephemeral"}


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def test_stream_has_anthropics_events_in_order() -> None:
    async with anthropic_client(FakeEngine("hello", at_once=3)) as http:
        events = await http.events()
    assert types(events) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert events[2] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hel"}}
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 4  # known before the first token
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


@pytest.mark.parametrize(
    ("script", "body"),
    [
        ("hello", {}),
        ("hello", {"max_tokens": 0}),
        ("hello", {"stop_sequences": ["ll"]}),
        ("", {}),
        (CALL + "\n" + CALL.replace("Paris", "Rome"), {"tools": [TOOL]}),
        ("I look. " + CALL, {"tools": [TOOL]}),
        (THOUGHT, {"thinking": ENABLED}),
        (THOUGHT + CALL, {"thinking": ENABLED, "tools": [TOOL]}),
        (THOUGHT, {"thinking": {"type": "adaptive", "display": "omitted"}}),
        (THOUGHT, {}),
    ],
)
async def test_fold_of_the_stream_is_the_body(
    script: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Signatures have random bytes, and calls random ids.
    monkeypatch.setattr("syringa.service.responses.encryption.ContentCipher.encrypt", lambda _, text: f"sealed {text}")
    monkeypatch.setattr("syringa.output.tools.base.random_id", lambda prefix, count: prefix + "1")
    async with anthropic_client(FakeEngine(script), model=reasoning_model(), database=str(tmp_path / "db")) as http:
        message = await http.create(**body)
        folded = fold(await http.events(**body))
    assert folded.pop("id") != message.pop("id")
    assert folded == message


async def test_tool_call_is_streamed_as_parts_of_its_json() -> None:
    async with anthropic_client(FakeEngine("I look. " + CALL), model=tool_model()) as http:
        events = await http.events(tools=[TOOL])
    start = next(event for event in events if event.get("index") == 1)
    assert start["content_block"].pop("id").startswith("toolu_")
    caller = {"type": "direct"}
    assert start["content_block"] == {"type": "tool_use", "name": "get_weather", "input": {}, "caller": caller}
    parts = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    assert len(parts) > 3
    assert "".join(parts) == '{"city": "Paris", "days": 1.50}'
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_error_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine("hello")
    engine.fail = EngineUnavailable("The worker died.")
    async with anthropic_client(engine) as http:
        answer = await http.send_body(stream=True)
        *_, last = parse_stream(answer.text)
        assert last == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "The worker died."},
            "request_id": answer.headers["request-id"],
        }
        engine.fail_first = True
        assert (await http.error(503, stream=True))["type"] == "overloaded_error"


async def test_silent_stream_has_ping_events() -> None:
    engine = FakeEngine("hello")
    engine.pause()
    body = {"messages": ASKED, "max_tokens": 5, "stream": True}
    config = Config(port=0, drain_timeout=1.0, keep_alive=0.05)
    async with server(engine, config, plain_model()) as http, http.stream("POST", PATH, json=body) as answer:
        text = ""
        async for part in answer.aiter_text():
            text += part
            if text.count("event: ping") == 2:
                engine.resume()
    events = parse_stream(text)
    assert types(events)[:2] == ["ping", "ping"]
    assert fold(events)["content"] == [{"type": "text", "text": "hello"}]


async def test_thinking_block_verifies_when_it_is_sent_back(tmp_path: Path) -> None:
    database = str(tmp_path / "db")
    async with anthropic_client(FakeEngine(THOUGHT), model=reasoning_model(), database=database) as http:
        message = await http.create(thinking=ENABLED)
        thinking, text = message["content"]
        assert (thinking["thinking"], text["text"]) == ("Let me see.", "Yes.")
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 5
        assert http.engine.requests[0].sampling.grammar is not None  # enforces the budget
        turns = [*ASKED, {"role": "assistant", "content": message["content"]}, *ASKED]
        await http.create(messages=turns, thinking=ENABLED)
        assert "[assistant]<think>Let me see.</think>Yes.[user]hi" in http.prompt()

    # In another process, with the same database.
    async with anthropic_client(model=reasoning_model(), database=database) as http:
        await http.create(messages=turns, thinking=ENABLED)
        assert "<think>Let me see.</think>" in http.prompt()
        redacted = {"type": "redacted_thinking", "data": thinking["signature"]}
        await http.create(messages=[*ASKED, {"role": "assistant", "content": [redacted, text]}, *ASKED])
        assert "<think>Let me see.</think>" in http.prompt()
        changed = thinking | {"thinking": "Let me not see."}
        error = await http.error(400, messages=[*ASKED, {"role": "assistant", "content": [changed, text]}, *ASKED])
        assert error["message"].startswith("messages[1].content[0].thinking: the signature is of another text")
        forged = thinking | {"signature": thinking["signature"][:-4] + "AAAA"}
        error = await http.error(400, messages=[*ASKED, {"role": "assistant", "content": [forged, text]}, *ASKED])
        assert error["message"].startswith("messages[1].content[0].signature: invalid")


async def test_omitted_thinking_has_a_signature_that_keeps_the_text(tmp_path: Path) -> None:
    omitted = {"type": "adaptive", "display": "omitted"}
    engine = FakeEngine(THOUGHT)
    async with anthropic_client(engine, model=reasoning_model(), database=str(tmp_path / "db")) as http:
        message = fold(await http.events(thinking=omitted))
        assert message["content"][0]["thinking"] == ""
        await http.create(messages=[*ASKED, {"role": "assistant", "content": message["content"]}, *ASKED])
        assert "<think>Let me see.</think>" in http.prompt()


async def test_thinking_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with anthropic_client(FakeEngine(THOUGHT), model=reasoning_model(), database=str(tmp_path / "db")) as http:
        for body in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "between_tools"}}):
            message = await http.create(**body)
            assert http.prompt().endswith("[assistant]<think></think>")
            assert await http.count(**body) == len(http.engine.requests[-1].prompt)
            assert [block["type"] for block in message["content"]] == ["text"]
        await http.create(thinking={"type": "adaptive"}, output_config={"effort": "high"})
        assert http.prompt().endswith("[assistant]")
        assert await http.count(thinking={"type": "adaptive"}) == len(http.engine.requests[-1].prompt)


async def test_thinking_and_effort_are_named_for_a_model_that_does_not_reason() -> None:
    async with anthropic_client() as http:
        ignored = await http.ignored(thinking=ENABLED, output_config={"effort": "low"})
    assert ignored == ["thinking", "output_config.effort"]


async def test_thinking_budget_is_named_for_a_model_whose_reasoning_cannot_be_cut(tmp_path: Path) -> None:
    model = reasoning_model(tokenizer=ByteTokenizer())
    async with anthropic_client(FakeEngine(THOUGHT), model=model, database=str(tmp_path / "db")) as http:
        answer = await http.send_body(thinking=ENABLED)
        assert (answer.status_code, answer.headers["x-syringa-ignored"]) == (200, "thinking.budget_tokens")
        assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]


# The fake engine finds half of each prompt in its cache.
LONG = "x" * 40


@pytest.mark.parametrize(
    ("body", "marked"),
    [
        ({}, ""),
        ({"cache_control": EPHEMERAL}, f"[s]sys[u]{LONG}[a]yes[u]{LONG}"),
        ({"messages": [2]}, f"[s]sys[u]{LONG}[a]yes[u]{LONG}"),
        ({"messages": [1]}, f"[s]sys[u]{LONG}[a]yes"),
        ({"messages": [0]}, f"[s]sys[u]{LONG}"),
        ({"system": [0]}, "[s]sys[u]"),
    ],
)
async def test_cache_counts_follow_the_last_cache_control(body: dict[str, Any], marked: str) -> None:
    marks: dict[str, Any] = {"cache_control": EPHEMERAL | {"ttl": "1h"}}
    turns = [("user", LONG), ("assistant", "yes"), ("user", LONG)]
    messages = [
        {
            "role": role,
            "content": [{"type": "text", "text": text} | (marks if index in body.get("messages", ()) else {})],
        }
        for index, (role, text) in enumerate(turns)
    ]
    system = [{"type": "text", "text": "sys"} | (marks if "system" in body else {})]
    top = {"cache_control": body["cache_control"]} if "cache_control" in body else {}
    async with anthropic_client() as http:
        message = await http.create(messages=messages, system=system, **top)
        usage, prompt = message["usage"], http.prompt()
    cached = len(prompt) // 2
    created = max(0, len(marked) - cached)
    assert usage["cache_read_input_tokens"] == cached
    assert usage["cache_creation_input_tokens"] == created
    assert usage["input_tokens"] == len(prompt) - cached - created
    name = "ephemeral_5m_input_tokens" if top else "ephemeral_1h_input_tokens"
    assert usage["cache_creation"][name] == created


class ColdEngine(FakeEngine):
    """Finds nothing in its cache."""

    def _delta(self, *arguments: Any, **fields: Any) -> Any:
        return msgspec.structs.replace(super()._delta(*arguments, **fields), cached_tokens=0)


async def test_cache_control_inside_of_a_message_and_of_tools_counts() -> None:
    blocks = [{"type": "text", "text": "one", "cache_control": EPHEMERAL}, {"type": "text", "text": "two"}]
    async with anthropic_client(ColdEngine("hello"), model=tool_model()) as http:
        usage = (await http.create(messages=[{"role": "user", "content": blocks}]))["usage"]
        assert usage["cache_creation_input_tokens"] == len("[user]one")
        usage = (await http.create(tools=[TOOL | {"cache_control": EPHEMERAL}]))["usage"]
        assert usage["cache_creation_input_tokens"] == http.prompt().index("hi[assistant]")
        # Of a block that is left out of the prompt, what precedes it counts.
        server = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}, "cache_control": EPHEMERAL}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "yes"}, server]}
        usage = (await http.create(messages=[*ASKED, answer, *ASKED]))["usage"]
        assert usage["cache_creation_input_tokens"] == len("[user]hi[assistant]yes")
        call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}, "cache_control": EPHEMERAL}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
        messages = [*ASKED, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        usage = (await http.create(messages=messages))["usage"]
        assert usage["cache_creation_input_tokens"] == http.prompt().index("[tool:f]")


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}},
        {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "d"}]},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "d"}]},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [
                {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "d"}]}
            ],
        },
    ],
    ids=["document", "search result", "tool result", "search result in a tool result"],
)
async def test_cache_control_of_blocks_in_a_block_counts_at_its_end(block: dict[str, Any]) -> None:
    call = {"role": "assistant", "content": [CALLED]}
    after = {"type": "text", "text": "after"}
    inner: Any = block["source"] if block["type"] == "document" else block
    while inner["type"] != "text":
        inner = inner["content"][0]
    inner["cache_control"] = EPHEMERAL | {"ttl": "1h"}
    async with anthropic_client(ColdEngine("hello"), model=tool_model()) as http:
        message = await http.create(messages=[*ASKED, call, {"role": "user", "content": [block, after]}])
        marked, _, _ = http.prompt().partition("[user]after" if block["type"] == "tool_result" else "\nafter")
    assert len(marked) < len(http.prompt())
    assert message["usage"]["cache_creation"]["ephemeral_1h_input_tokens"] == len(marked)


async def test_cache_control_of_a_hosted_tool_counts() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", "cache_control": EPHEMERAL}
    async with anthropic_client(ColdEngine("hello"), model=tool_model()) as http:
        usage = (await http.create(tools=[TOOL, hosted]))["usage"]
        assert usage["cache_creation_input_tokens"] == http.prompt().index("hi[assistant]")
        error = await http.error(400, tools=[hosted | {"cache_control": {"type": "forever"}}])
        assert error["message"].startswith("tools[0].cache_control.type: invalid enum value 'forever'.")


async def test_cache_control_of_a_system_block_counts_up_to_its_end() -> None:
    system = [{"type": "text", "text": "A", "cache_control": EPHEMERAL}, {"type": "text", "text": "B"}]
    async with anthropic_client(ColdEngine("hello")) as http:
        usage = (await http.create(system=system))["usage"]
        assert http.prompt() == "[s]A\nB[u]hi[a]"
    assert usage["cache_creation_input_tokens"] == len("[s]A")
