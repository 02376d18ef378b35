"""A client that sends raw bytes to a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from syringa.api.models.served_model import ServedModel
from syringa.config import Config
from tests.client import server
from tests.fake_engine import FakeEngine

BODY = json.dumps({"prompt": "x"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
COMPLETION_REQUEST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next response, which must have a content-length."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def expect_rejection(self, status: int, code: str) -> dict[str, str]:
        found, headers, body = await self.response()
        assert (found, json.loads(body)["error"]["code"]) == (status, code)
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/json"
        assert await self.is_closed()
        return headers

    async def is_closed(self, seconds: float = 60) -> bool:
        """Whether the server closes the connection without sending anything more."""
        try:
            async with asyncio.timeout(seconds):
                return await self.reader.read() == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


class RunningServer:
    def __init__(self, port: int, engine: FakeEngine, accounting: list[Any]) -> None:
        self.port, self.engine, self.accounting = port, engine, accounting

    @contextlib.asynccontextmanager
    async def client(self, data: bytes = b"") -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            client = RawClient(reader, writer)
            client.send(data)
            yield client
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def running_server(
    engine: FakeEngine | None = None, model: ServedModel | None = None, **settings: Any
) -> AsyncIterator[RunningServer]:
    engine = engine or FakeEngine("hello")
    accounting: list[Any] = []
    config = Config(**({"port": 0, "drain_timeout": 1.0, "read_timeout": 60.0} | settings))
    async with server(engine, config, model, observe=accounting.append) as http:
        yield RunningServer(http.base_url.port or 0, engine, accounting)
