"""A web server that answers whatever a test wants, byte by byte, and pictures to serve."""

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

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Web:
    """Pages by path. `seen` has the head of every request, `port` where it listens."""

    def __init__(self) -> None:
        self.pages: dict[str, Answer] = {}
        self.seen: list[str] = []
        self.at_once = self.most_at_once = 0
        self.port = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.seen]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
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
            pass  # the client went away, as it should
        finally:
            self.at_once -= 1
            with contextlib.suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    web = Web()
    server = await asyncio.start_server(web.handle, "127.0.0.1", 0, ssl=tls)
    web.port = server.sockets[0].getsockname()[1]
    try:
        yield web
    finally:
        server.close()
        await server.wait_closed()


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """An answer; a header that is given replaces the right one."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in ({"content-length": str(len(body))} | named).items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return response(b"elsewhere", status, location=to)


def picture(kind: str = "PNG", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """Noise, so that a file that is cut off lacks pixels."""
    file = io.BytesIO()
    noise = Image.effect_noise(size, 80).convert("P" if kind == "GIF" else "RGB")
    noise.save(file, kind, **options)
    return file.getvalue()


def animation(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.effect_noise((20, 10), 80).convert("P" if kind == "GIF" else "RGB") for _ in range(3)]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


async def refused(attempt: Awaitable[bytes]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await attempt
    assert caught.value.code
    assert "127.0.0.1" not in caught.value.message
    return caught.value
