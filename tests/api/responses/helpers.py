"""Helpers of the response tests: requests through the wire layer, without HTTP and storage."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from syringa.api.decoding import convert
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.api.responses import PreparedResponse, ResponseContext, ResponseRequest, StreamEvent, prepare_response
from syringa.errors import SyringaError
from syringa.events import Event
from syringa.generation import generate
from syringa.output.collect import collect
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine
from tests.schemas import validate_open_responses, validate_openai


class FakeCipher:
    """Neither secret nor safe, but only it opens what it sealed."""

    def encrypt(self, text: str) -> str:
        return "sealed:" + base64.b64encode(text.encode()).decode()

    def decrypt(self, encrypted: str) -> str | None:
        return base64.b64decode(encrypted[7:]).decode() if encrypted.startswith("sealed:") else None


def context(
    history: Sequence[dict[str, Any]] = (),
    found: Mapping[str, dict[str, Any]] | None = None,
    *,
    open_mode: bool = False,
) -> ResponseContext:
    return ResponseContext(
        tenant="org", history=history, referenced_items=found or {}, cipher=FakeCipher(), open_mode=open_mode
    )


async def prepare(
    body: dict[str, Any],
    model: ServedModel | None = None,
    request_context: ResponseContext | None = None,
    ignored: list[str] | None = None,
) -> PreparedResponse:
    ignored = [] if ignored is None else ignored
    request = convert({"input": "hi"} | body, ResponseRequest, ignored=ignored)
    return await prepare_response(request, FixedModels([model or plain_model()]), ignored, request_context or context())


async def run_generation(call: PreparedResponse, engine: FakeEngine | str = "hello") -> list[Event]:
    """Run the generation and return its events."""
    engine = FakeEngine(engine) if isinstance(engine, str) else engine
    seen: list[Event] = []
    await generate(engine, call.model.tokenizer, call.request, seen.extend)
    return seen


async def respond(body: dict[str, Any], engine: FakeEngine | str = "hello", **kwargs: Any) -> dict[str, Any]:
    """Return the full response, validated against both schemas."""
    call = await prepare(body, **kwargs)
    response = to_json(call.writer.render(collect(await run_generation(call, engine))))
    validate_openai(response, "Response")
    validate_open_responses(response)
    return response


async def stream(
    body: dict[str, Any], engine: FakeEngine | str = "hello", *, open_mode: bool = False, **kwargs: Any
) -> list[dict[str, Any]]:
    """Return the events of a stream, each validated against the schema of its mode."""
    kwargs.setdefault("request_context", context(open_mode=open_mode))
    call = await prepare({"stream": True} | body, **kwargs)
    events = write_events(call, await run_generation(call, engine))
    for event in events:
        if open_mode:
            validate_open_responses(event, "StreamingEvent")
        else:
            validate_openai(event, "ResponseStreamEvent")
    return events


def write_events(call: PreparedResponse, generated: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the stream events for the events of a generation; their numbers and types are checked."""
    events: list[StreamEvent] = call.writer.begin()
    for each in generated:
        events += call.writer.write(each)
    sent = [to_json(each) for each in events]
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))
    assert [each["type"] for each in sent] == [each.type for each in events]
    return sent


def to_json(value: msgspec.Struct) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return decoded


def event_types(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the event types in order; consecutive deltas count once."""
    names = [each["type"].removeprefix("response.") for each in events]
    return [name for i, name in enumerate(names) if not (i and name == names[i - 1] and name.endswith("delta"))]


def prompt_of(call: PreparedResponse) -> str:
    return bytes(call.request.prompts[0]).decode()


async def prompt(body: dict[str, Any], **kwargs: Any) -> str:
    return prompt_of(await prepare(body, **kwargs))


async def refused(body: dict[str, Any], **kwargs: Any) -> SyringaError:
    with pytest.raises(SyringaError) as caught:
        await prepare(body, **kwargs)
    return caught.value


def rebuild_output(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rebuild the output from deltas like a client, and check each `done` event against them."""
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for event in events:
        kind, index = event["type"], event.get("output_index")
        if index is None:
            continue
        if kind == "response.output_item.added":
            assert index == len(items)
            assert event["item"].get("status") == "in_progress"
            items.append(event["item"])
            texts[index] = ""
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            assert text_of(event["item"]) == texts[index]
            items[index] = event["item"]
        else:
            assert event["item_id"] == items[index]["id"]
            texts[index] += event.get("delta", "")
            if kind.endswith(".done"):
                whole = [event[key] for key in ("text", "arguments", "input") if key in event]
                assert [*whole, *([event["part"]["text"]] if "part" in event else [])] == [texts[index]]
    return items


def text_of(item: dict[str, Any]) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return str(item["arguments"] if "arguments" in item else item["input"])
