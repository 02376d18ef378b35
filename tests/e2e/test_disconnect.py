"""The sequences of a disconnected client are freed at the next step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from syringa.api.models.loading import load_model
from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.client.local import start_local
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.interface import SingleEngineProvider
from syringa.http.server.listener import listen
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState

pytestmark = pytest.mark.model


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[WorkerClient, str]]:
    config = Config(port=0, drain_timeout=1)
    listener = listen(config)
    async with start_local(config) as engine:
        models = FixedModels([load_model(config)])
        task = asyncio.create_task(serve_api(config, SingleEngineProvider(engine), models, listener, AppState(config)))
        try:
            yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            listener.close()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(120):
        while not await condition():  # noqa: ASYNC110  the engine can only be polled
            await asyncio.sleep(0.02)


async def test_disconnected_clients_free_their_sequences() -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "n": 3}
    async with served() as (engine, url), httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def busy() -> bool:
            return (await engine.stats()).running == 3

        async def idle() -> bool:
            stats = await engine.stats()
            return stats.running == 0 and stats.blocks_free + stats.blocks_cached == stats.blocks_total

        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            await anext(answer.aiter_lines())
            await until(busy)
        await until(idle)

        waiting = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(busy)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(idle)
