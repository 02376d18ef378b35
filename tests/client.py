"""Helpers of the HTTP tests: a client of the app itself, and a real server where sockets matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed

from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.http.server.listener import listen
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from syringa.service.usage.accounting import Observer
from tests.fake_engine import FakeEngine, fake_model


def client(
    engine: FakeEngine | None = None, config: Config | None = None, model: ServedModel | None = None
) -> httpx.AsyncClient:
    app = create_app(
        config or Config(), SingleEngineProvider(engine or FakeEngine("hello")), FixedModels([model or fake_model()])
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost"
    )


@contextlib.asynccontextmanager
async def server(
    engine: FakeEngine,
    config: Config | None = None,
    model: ServedModel | None = None,
    observe: Observer | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run a server on a free port, in this event loop. `observe` is called at the end of each metered request."""
    config = config or Config(port=0, drain_timeout=1.0)
    listener = listen(config)
    port = listener.getsockname()[1]
    app_state = AppState(config)
    if observe is not None:
        app_state.observers.append(observe)
    models = FixedModels([model or fake_model()])
    task = asyncio.create_task(serve_api(config, SingleEngineProvider(engine), models, listener, app_state))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
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
    """Return the data of each server-sent event, without comments."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def eventually(condition: Any, seconds: float = 60.0) -> bool:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


async def settle() -> None:
    """Run the event loop for some rounds: enough for what is due, including socket I/O within this process."""
    for _ in range(30):
        await asyncio.sleep(0.005)


async def with_patience(check: Callable[[float], Awaitable[None]]) -> None:
    """Run a check that depends on a time limit of so many seconds: a short one first.

    On a machine that stalls, the short one may expire before the client has done its part. A fault fails both.
    """
    try:
        await check(1.0)
    except (AssertionError, OSError, EOFError, ConnectionClosed):
        await check(10.0)


async def until(condition: Callable[[], Awaitable[object]], seconds: float = 60.0) -> None:
    """Wait until a condition holds, polling it."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  it can only be polled
            await asyncio.sleep(0.02)
