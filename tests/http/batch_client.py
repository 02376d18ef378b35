"""A client of an app that runs batches on the fake engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx

from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.config import Config, Prices
from syringa.engine.interface import Engine, SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.client import until
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine

FILES, BATCHES, CHAT = "/v1/files", "/v1/batches", "/v1/chat/completions"


def chat_line(custom_id: str, **body: Any) -> str:
    given = {"model": "fake", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 8} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": given})


class BatchClient(httpx.AsyncClient):
    app_state: AppState

    async def upload(self, content: Iterable[str] | bytes, **fields: Any) -> httpx.Response:
        data = content if isinstance(content, bytes) else "\n".join(content).encode()
        return await self.post(FILES, files={"file": ("input.jsonl", data)}, data={"purpose": "batch"} | fields)

    async def create_batch(
        self, content: Iterable[str] | bytes, endpoint: str = CHAT, **changes: Any
    ) -> dict[str, Any]:
        id = (await self.upload(content)).json()["id"]
        body = {"input_file_id": id, "endpoint": endpoint, "completion_window": "24h"} | changes
        answer = await self.post(BATCHES, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def finished(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def is_finished() -> bool:
            nonlocal found
            found = (await self.get(f"{BATCHES}/{id}")).json()
            return found["status"] in ("completed", "failed", "expired", "cancelled")

        await until(is_finished)
        return found

    async def lines(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        answer = await self.get(f"{FILES}/{file}/content")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


@contextlib.asynccontextmanager
async def batch_client(
    folder: Path,
    engine: Engine | None = None,
    *,
    model: ServedModel | None = None,
    prices: Prices | None = None,
    **settings: Any,
) -> AsyncIterator[BatchClient]:
    config = Config(**({"database": str(folder / "a.db")} | settings))
    app_state = AppState(config, prices=lambda model: prices or Prices())
    await app_state.start()
    engine = engine or FakeEngine("hello", at_once=8)
    app = create_app(
        config, SingleEngineProvider(engine), FixedModels([model or plain_model(), embedding_model()]), app_state
    )
    headers = {"authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with BatchClient(transport=transport, base_url="http://localhost", headers=headers) as http:
            http.app_state = app_state
            yield http
    finally:
        await app_state.close()
