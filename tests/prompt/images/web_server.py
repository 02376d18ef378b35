"""A web server with scripted responses, and images to serve."""

from __future__ import annotations

import asyncio
import contextlib
import io
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from PIL import Image

from syringa.errors import InvalidRequest

Page = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class WebServer:
    """A server of pages by path. `seen` contains the head of every request."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.seen: list[str] = []
        self.concurrent = self.max_concurrent = 0
        self.port = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.seen]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self.concurrent)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.seen.append(head)
            page = self.pages.get(head.split(" ")[1], response(b"", "404 Not Found"))
            if isinstance(page, bytes):
                writer.write(page)
            else:
                await page(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client disconnected, as expected
        finally:
            self.concurrent -= 1
            with contextlib.suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[WebServer]:
    web = WebServer()
    server = await asyncio.start_server(web.handle, "127.0.0.1", 0, ssl=tls)
    web.port = server.sockets[0].getsockname()[1]
    try:
        yield web
    finally:
        server.close()
        await server.wait_closed()


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """Return a response; the given headers replace the correct ones."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in ({"content-length": str(len(body))} | named).items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return response(b"elsewhere", status, location=to)


def image_file(kind: str = "PNG", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """Return a noise image, which lacks pixels if the file is truncated."""
    file = io.BytesIO()
    noise = Image.effect_noise(size, 80).convert("P" if kind == "GIF" else "RGB")
    noise.save(file, kind, **options)
    return file.getvalue()


def animation(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.effect_noise((20, 10), 80).convert("P" if kind == "GIF" else "RGB") for _ in range(3)]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


async def rejected(attempt: Awaitable[bytes]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await attempt
    assert caught.value.code
    assert "127.0.0.1" not in caught.value.message
    return caught.value
