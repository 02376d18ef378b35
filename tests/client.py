"""Helpers of the HTTP tests: a client on the app itself, and a real server where sockets matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from syringa.api.model import Models, ServedModel
from syringa.config import Config
from syringa.http.app import create_app
from syringa.http.server import listen, serve_api
from tests.fake_engine import FakeEngine, fake_model


def client(
    engine: FakeEngine | None = None, config: Config | None = None, model: ServedModel | None = None
) -> httpx.AsyncClient:
    app = create_app(config or Config(), engine or FakeEngine("hello"), Models([model or fake_model()]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


@contextlib.asynccontextmanager
async def server(
    engine: FakeEngine, config: Config | None = None, model: ServedModel | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A server on a free port, in this loop."""
    config = config or Config(port=0, drain_timeout=1.0)
    listener = listen(config)
    port = listener.getsockname()[1]
    task = asyncio.create_task(serve_api(config, engine, listener, model=model or fake_model()))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    await http.get("/health")
                    break
            yield http
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


def events(text: str) -> list[Any]:
    """The data of each server-sent event; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def eventually(condition: Any, seconds: float = 2.0) -> bool:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False
