"""Responses that are too large, too slow or incomplete."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest

from syringa.prompt.images.fetch import FetchLimits, fetch
from tests.prompt.images.web_server import WebServer, redirect, rejected, response, serving

HERE = FetchLimits(allow_private=True, max_bytes=1000, timeout=60.0)


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with serving() as web:
        yield web


@pytest.mark.parametrize(
    "page",
    [
        response(b"x" * 1001),
        response(b"", content_length="99999999999"),
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n",
    ],
)
async def test_fetch_rejects_large_bodies(web: WebServer, page: bytes) -> None:
    web.pages["/a"] = page
    error = await rejected(fetch(web.url("/a"), HERE))
    assert "more than 1000 bytes" in error.message
    assert error.code == "image_file_too_large"


async def test_fetch_stops_reading_an_endless_body(web: WebServer) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    web.pages["/a"] = endless
    assert "more than 1000" in (await rejected(fetch(web.url("/a"), HERE))).message
    assert sent < 50_000_000


async def test_fetch_accepts_a_body_of_the_maximum_size(web: WebServer) -> None:
    web.pages["/a"] = response(b"x" * 1000)
    assert len(await fetch(web.url("/a"), HERE)) == 1000


async def test_fetch_rejects_compressed_bodies(web: WebServer) -> None:
    web.pages["/a"] = response(gzip.compress(b"x" * 100_000), content_encoding="gzip")
    assert "compressed" in (await rejected(fetch(web.url("/a"), HERE))).message
    web.pages["/a"] = response(b"body", content_encoding="identity")
    assert await fetch(web.url("/a"), HERE) == b"body"


@pytest.mark.parametrize(
    "page", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", response(b"cut", content_length="100"), b"HTTP/1.1 200"]
)
async def test_fetch_rejects_incomplete_responses(web: WebServer, page: bytes) -> None:
    web.pages["/a"] = page
    error = await rejected(fetch(web.url("/a"), HERE))
    assert error.message == "its server sent no complete and valid response."


async def test_fetch_reports_refused_connections() -> None:
    assert "no connection" in (await rejected(fetch("http://127.0.0.1:1/a", HERE))).message


async def test_fetch_times_out_on_slow_servers(web: WebServer) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1)

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
        for _ in range(20):
            writer.write(b"x")
            await asyncio.sleep(0.05)

    web.pages |= {"/silent": silent, "/drip": drip}
    for path in ("/silent", "/drip"):
        limits = FetchLimits(allow_private=True, max_bytes=1000, timeout=0.2)
        assert "longer than 0.2 seconds" in (await rejected(fetch(web.url(path), limits))).message


async def test_fetch_timeout_covers_all_redirects(web: WebServer) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(redirect("/a"))

    web.pages["/a"] = slow
    limits = FetchLimits(allow_private=True, max_bytes=1000, timeout=0.3)
    assert "longer than" in (await rejected(fetch(web.url("/a"), limits))).message


async def test_fetch_timeout_zero_means_no_limit(web: WebServer) -> None:
    web.pages["/a"] = response(b"body")
    assert await fetch(web.url("/a"), FetchLimits(allow_private=True, max_bytes=1000, timeout=0)) == b"body"
