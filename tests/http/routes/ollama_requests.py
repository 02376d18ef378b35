"""Helpers of the tests of Ollama's endpoints that generate."""

from __future__ import annotations

import json
from typing import Any

import httpx

from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from tests.chat_models import plain_model
from tests.client import client
from tests.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class KeepingEngines(SingleEngineProvider):
    """Records how long models are to be kept."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.kept: list[tuple[str, float]] = []

    def keep(self, model: str, idle_timeout: float) -> None:
        self.kept.append((model, idle_timeout))


def app_client(engines: SingleEngineProvider, *models: ServedModel, **settings: Any) -> httpx.AsyncClient:
    app = create_app(Config(**settings), engines, FixedModels(models or [plain_model()]))
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost"
    )


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


async def send(
    path: str, body: dict[str, Any], engine: FakeEngine | None = None, model: ServedModel | None = None, **settings: Any
) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    async with client(engine or FakeEngine("hello"), Config(**settings), model or plain_model()) as http:
        return await http.post(path, json={"model": "fake"} | prompt | body)


async def refused(path: str, body: dict[str, Any], **kwargs: Any) -> str:
    """Send a request that has to be refused with 400, and return the message."""
    answer = await send(path, body, **kwargs)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    message: str = answer.json()["error"]
    return message


def text_of(path: str, line: dict[str, Any]) -> str:
    text: str = line["message"]["content"] if path == CHAT else line["response"]
    return text
