"""Helpers of the tests of the Responses API: a client of an app with a store, and a parser of its streams."""

from __future__ import annotations

import contextlib
import json
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

PATH = "/v1/responses"


class ResponsesClient(httpx.AsyncClient):
    """A client with access to the engine and the state of its app."""

    engine: FakeEngine
    app_state: AppState

    async def respond(self, input: Any = "hi", **body: Any) -> dict[str, Any]:
        answer = await self.post(PATH, json={"input": input} | body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def stream(self, input: Any = "hi", **body: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        answer = await self.post(PATH, json={"input": input, "stream": True} | body)
        assert answer.status_code == 200, answer.text
        return stream_events(answer.text)

    async def expect_error(self, status: int, **body: Any) -> dict[str, Any]:
        answer = await self.post(PATH, json={"input": "hi"} | body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()["error"]
        return found

    def prompt(self, index: int = -1) -> str:
        """Return a prompt that the engine received."""
        return bytes(self.engine.requests[index].prompt).decode()


@contextlib.asynccontextmanager
async def responses_client(
    database: str,
    engine: FakeEngine | None = None,
    *,
    model: ServedModel | None = None,
    key: str = "",
    **settings: Any,
) -> AsyncIterator[ResponsesClient]:
    """Run one API server process, without sockets, on the given database."""
    config = Config(database=database, **settings)
    engine = engine or FakeEngine("hello")
    app_state = AppState(config)
    asgi = create_app(config, SingleEngineProvider(engine), FixedModels([model or plain_model()]), app_state)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(asgi, raise_app_exceptions=False)
    async with ResponsesClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        http.engine, http.app_state = engine, app_state
        try:
            yield http
        finally:
            await app_state.close()


def stream_events(text: str, *, done: bool = False) -> list[dict[str, Any]]:
    """Return the events of a stream, and check its framing. `done`: it must end with `[DONE]`, as in Open Responses."""
    assert "\r" not in text
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    if done:
        assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])
