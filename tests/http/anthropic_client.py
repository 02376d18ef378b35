"""Helpers of the tests of Anthropic's API: a client of an app, a parser of its streams, and the fold of a stream."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine

PATH = "/v1/messages"
ASKED = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "get_weather",
    "description": "Return the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLED = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}


def _png() -> str:
    """Return a black image of 2 × 2 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 14)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _png()}}


class AnthropicClient(httpx.AsyncClient):
    """A client with access to the engine of its app."""

    engine: FakeEngine

    async def send_body(self, path: str = PATH, **body: Any) -> httpx.Response:
        """Post a body with defaults for the required fields."""
        defaults = {"messages": ASKED} | ({"max_tokens": 500} if path == PATH else {})
        return await self.post(path, json=defaults | body)

    async def create(self, **body: Any) -> dict[str, Any]:
        answer = await self.send_body(**body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def ignored(self, **body: Any) -> list[str]:
        """Return the fields that the server names as ignored."""
        answer = await self.send_body(**body)
        assert answer.status_code == 200, answer.text
        header: str = answer.headers.get("x-syringa-ignored", "")
        return header.split(", ")

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        answer = await self.send_body(stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_stream(answer.text)

    async def error(self, status: int, path: str = PATH, **body: Any) -> dict[str, Any]:
        answer = await self.send_body(path, **body)
        assert answer.status_code == status, answer.text
        return check_error(answer)

    async def count(self, **body: Any) -> int:
        answer = await self.send_body(PATH + "/count_tokens", **body)
        assert answer.status_code == 200, answer.text
        found: int = answer.json()["input_tokens"]
        return found

    def prompt(self, index: int = -1) -> str:
        """Return a prompt that the engine received."""
        return bytes(self.engine.requests[index].prompt).decode()


@contextlib.asynccontextmanager
async def anthropic_client(
    engine: FakeEngine | None = None,
    *,
    model: ServedModel | None = None,
    app_state: AppState | None = None,
    **settings: Any,
) -> AsyncIterator[AnthropicClient]:
    """Run one API server process, without sockets."""
    config = Config(**settings)
    engine = engine or FakeEngine("hello")
    state = AppState(config) if app_state is None else app_state
    asgi = create_app(config, SingleEngineProvider(engine), FixedModels([model or plain_model()]), state)
    transport = httpx.ASGITransport(asgi, raise_app_exceptions=False)
    async with AnthropicClient(transport=transport, base_url="http://localhost") as http:
        http.engine = engine
        try:
            yield http
        finally:
            await state.close()


def check_error(answer: httpx.Response) -> dict[str, Any]:
    """Check the envelope of an error, and return the error."""
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    found: dict[str, Any] = body["error"]
    return found


def parse_stream(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, and check its framing."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def fold(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream make, and check their order as clients do."""
    start, *events = [event for event in events if event["type"] != "ping"]
    assert start["type"] == "message_start"
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["output_tokens"] == 0
    inputs: dict[int, str] = {}
    is_open = False
    *events, last, stop = events
    for event in events:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open = True
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert is_open
                _add_delta(message["content"][-1], event["delta"], event["index"], inputs)
            case "content_block_stop":
                assert is_open
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    assert (last["type"], stop) == ("message_delta", {"type": "message_stop"})
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    message |= last["delta"]
    message["usage"] |= last["usage"]
    return message


def _add_delta(block: dict[str, Any], delta: dict[str, Any], index: int, inputs: dict[int, str]) -> None:
    kind = delta.pop("type")
    ((name, text),) = delta.items()
    if name == "partial_json":
        assert (kind, block["type"], block["input"]) == ("input_json_delta", "tool_use", {})
        inputs[index] = inputs.get(index, "") + text
        return
    assert kind == f"{name}_delta"
    assert text
    assert block["signature" if name == "signature" else block["type"]] == "" or name != "signature"
    block[name] += text
