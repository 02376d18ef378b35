"""Measure the API process's CPU time per server-sent event with a free engine: `python -m bench.api_events`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator

import uvloop

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.server.server import listen, serve_api
from syringa.service.app_state import AppState
from syringa.types import EngineDelta, EngineRequest
from tests.fake_engine import FakeEngine, fake_model

STREAMS, TOKENS = 64, 1000

CLIENT = r"""
import asyncio, json, sys
port, streams, tokens = map(int, sys.argv[1:])
body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
head += b"content-length: %d\r\n\r\n"
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(head % len(body) + body)
    seen = await reader.readuntil(b"[DONE]")
    writer.close()
    return seen.count(b"data: ")
async def all_of_them():
    return sum(await asyncio.gather(*(one() for _ in range(streams))))
print(asyncio.run(all_of_them()))
"""


class EagerEngine(FakeEngine):
    """Yields one token per event loop iteration."""

    async def deltas(self, request: EngineRequest) -> AsyncGenerator[EngineDelta]:
        for left in reversed(range(request.stopping.max_tokens)):
            await asyncio.sleep(0)
            yield EngineDelta(request.id, 0, [97], finish=None if left else "length")


async def measure() -> float:
    config = Config(port=0, drain_timeout=1)
    listener = listen(config)
    models = FixedModels([fake_model()])
    server = asyncio.create_task(
        serve_api(config, SingleEngineProvider(EagerEngine()), models, listener, AppState(config))
    )
    arguments = [str(each) for each in (listener.getsockname()[1], STREAMS, TOKENS)]
    before = time.process_time()
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *arguments, stdout=subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(client.communicate(), 60)
        spent = time.process_time() - before
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
    if int(output) != STREAMS * (TOKENS + 2):  # the finish and [DONE] are events too
        raise RuntimeError(f"expected {STREAMS * (TOKENS + 2)} events, got {int(output)}")
    return int(output) / spent


if __name__ == "__main__":
    rates = sorted(uvloop.run(measure()) for _ in range(5))
    print(f"{rates[2]:,.0f} events per second of CPU time (median of 5, {rates[0]:,.0f} to {rates[-1]:,.0f})")
