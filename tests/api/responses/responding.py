"""Helpers of the tests of responses: a request on its way through the wire layer, without HTTP and without a store."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from syringa.api.decoding import convert
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.api.responses import Context, ResponseCall, ResponseRequest, StreamEvent, prepare
from syringa.errors import SyringaError
from syringa.events import Event
from syringa.generation import generate
from syringa.output.collect import collect
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine
from tests.schemas import validate, validate_open


class FakeSeal:
    """Neither secret nor safe, but only it opens what it sealed."""

    def seal(self, text: str) -> str:
        return "sealed:" + base64.b64encode(text.encode()).decode()

    def open(self, sealed: str) -> str | None:
        return base64.b64decode(sealed[7:]).decode() if sealed.startswith("sealed:") else None


def context(
    history: Sequence[dict[str, Any]] = (),
    found: Mapping[str, dict[str, Any]] | None = None,
    *,
    open_mode: bool = False,
) -> Context:
    return Context(tenant="org", history=history, found=found or {}, seal=FakeSeal(), open_mode=open_mode)


async def prepared(
    body: dict[str, Any],
    model: ServedModel | None = None,
    around: Context | None = None,
    ignored: list[str] | None = None,
) -> ResponseCall:
    ignored = [] if ignored is None else ignored
    request = convert({"input": "hi"} | body, ResponseRequest, ignored=ignored)
    return await prepare(request, FixedModels([model or plain_model()]), ignored, around or context())


async def ran(call: ResponseCall, engine: FakeEngine | str = "hello") -> list[Event]:
    """What the generation says."""
    engine = FakeEngine(engine) if isinstance(engine, str) else engine
    seen: list[Event] = []
    await generate(engine, call.model.tokenizer, call.request, seen.extend)
    return seen


async def respond(body: dict[str, Any], engine: FakeEngine | str = "hello", **kwargs: Any) -> dict[str, Any]:
    """The whole response. It fits both schemas."""
    call = await prepared(body, **kwargs)
    response = plain(call.writer.render(collect(await ran(call, engine))))
    validate(response, "Response")
    validate_open(response)
    return response


async def stream(
    body: dict[str, Any], engine: FakeEngine | str = "hello", *, open_mode: bool = False, **kwargs: Any
) -> list[dict[str, Any]]:
    """The events of a stream, each of which fits the schema of its mode, numbered as they should be."""
    kwargs.setdefault("around", context(open_mode=open_mode))
    call = await prepared({"stream": True} | body, **kwargs)
    events = written(call, await ran(call, engine))
    for event in events:
        if open_mode:
            validate_open(event, "StreamingEvent")
        else:
            validate(event, "ResponseStreamEvent")
    return events


def written(call: ResponseCall, said: Sequence[Event]) -> list[dict[str, Any]]:
    events: list[StreamEvent] = call.writer.begin()
    for each in said:
        events += call.writer.write(each)
    sent = [plain(each) for each in events]
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))
    assert [each["type"] for each in sent] == [each.type for each in events]
    return sent


def plain(value: msgspec.Struct) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return decoded


def types(events: Sequence[dict[str, Any]]) -> list[str]:
    """The types in order; deltas that follow each other count once."""
    names = [each["type"].removeprefix("response.") for each in events]
    return [name for i, name in enumerate(names) if not (i and name == names[i - 1] and name.endswith("delta"))]


def prompt_of(call: ResponseCall) -> str:
    return bytes(call.request.prompts[0]).decode()


async def prompt(body: dict[str, Any], **kwargs: Any) -> str:
    return prompt_of(await prepared(body, **kwargs))


async def refused(body: dict[str, Any], **kwargs: Any) -> SyringaError:
    with pytest.raises(SyringaError) as caught:
        await prepared(body, **kwargs)
    return caught.value


def rebuilt(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together from the deltas, with each `done` checked against what came before."""
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
