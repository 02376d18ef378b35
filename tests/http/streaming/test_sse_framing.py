"""The framing of streams on the wire."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import server
from tests.fake_engine import FakeEngine
from tests.http.raw_client import running_server


async def chunks(reader: asyncio.StreamReader) -> list[bytes]:
    """Return the chunks of one response."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"transfer-encoding: chunked" in head
    found = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        found.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return found


@pytest.mark.parametrize(
    ("path", "asked", "at_once"),
    [
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 1),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "echo": True, "logprobs": 1}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 1),
        ("/v1/responses", {"input": "x", "store": False}, 1),
        ("/v1/responses", {"input": "x", "store": False}, 50),
    ],
)
async def test_every_event_is_one_chunk(path: str, asked: dict[str, Any], at_once: int) -> None:
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    engine = FakeEngine("hello", at_once=at_once)
    async with (
        asyncio.timeout(60),
        running_server(engine, plain_model()) as server,
        server.client(head.encode() + body) as client,
    ):
        found = await chunks(client.reader)
    assert len(found) > 3
    for each in found:
        assert each.startswith(b"event: " if path == "/v1/responses" else b"data: ")
        assert each.endswith(b"\n\n")
        assert each.count(b"\n\n") == 1
        assert b"\r" not in each


async def test_empty_stream_is_terminated(tmp_path: Path) -> None:
    config = Config(port=0, database=str(tmp_path / "a.db"), drain_timeout=1.0)
    async with asyncio.timeout(60), server(FakeEngine("hello"), config, plain_model()) as http:
        made = (await http.post("/v1/responses", json={"input": "x", "background": True})).json()
        path = f"/v1/responses/{made['id']}"
        while (await http.get(path)).json()["status"] != "completed":  # noqa: ASYNC110  it can only be asked
            await asyncio.sleep(0.02)
        whole = (await http.get(path, params={"stream": "true"})).text
        last = whole.count("event: ") - 1
        assert last > 3
        for method in ("GET", "HEAD"):
            answer = await http.request(method, path, params={"stream": "true", "starting_after": last})
            assert (answer.status_code, answer.text) == (200, "")
            assert (await http.get("/health")).status_code == 200
