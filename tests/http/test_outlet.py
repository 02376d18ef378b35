from __future__ import annotations

import asyncio
from typing import Any

import pytest

from syringa.http.outlet import ClientGone, Outlet


class Connection:
    """Takes what is sent; waits before each part while it is `full`."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.started = self.ended = self.broken = False
        self.room = asyncio.Event()
        self.room.set()

    async def send(self, message: Any) -> None:
        if not self.room.is_set():
            await self.room.wait()
        if self.broken:
            raise OSError("broken pipe")
        if message["type"] == "http.response.start":
            self.started = True
        else:
            assert self.started
            assert not self.ended
            self.got.append(message["body"])
            self.ended = not message["more_body"]


def outlet(connection: Connection) -> Outlet:
    return Outlet(connection.send, connection.send, [])


async def test_parts_are_sent_on_the_spot() -> None:
    connection = Connection()
    out = outlet(connection)
    for part in (b"a", b"b", b"c"):
        out.put(part)
        assert connection.got[-1] == part
    await out.end(b"d")
    assert connection.got == [b"a", b"b", b"c", b"d"]
    assert connection.ended


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_a_slow_client_gets_every_part_in_order(before: int) -> None:
    connection = Connection()
    out = outlet(connection)
    parts = [bytes([97 + each]) for each in range(9)]
    for part in parts[:before]:
        out.put(part)
    connection.room.clear()
    for part in parts[before:6]:
        out.put(part)
    assert len(connection.got) == before
    connection.room.set()
    await asyncio.sleep(0.01)
    assert connection.got == parts[:6]
    for part in parts[6:]:
        out.put(part)
    await out.end(b"!")
    assert connection.got == [*parts, b"!"]


async def test_the_end_waits_for_what_waits() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    out.put(b"b")
    end = asyncio.create_task(out.end(b"c"))
    await asyncio.sleep(0.01)
    assert not end.done()
    connection.room.set()
    await end
    assert connection.got == [b"a", b"b", b"c"]


async def test_a_broken_connection_is_told() -> None:
    connection = Connection()
    out = outlet(connection)
    out.put(b"a")
    connection.broken = True
    with pytest.raises(ClientGone):
        out.put(b"b")
    with pytest.raises(ClientGone):
        await out.end(b"c")


async def test_a_connection_that_breaks_while_parts_wait() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    connection.broken = True
    connection.room.set()
    await asyncio.sleep(0.01)
    with pytest.raises(ClientGone):
        out.put(b"b")


async def test_closing_gives_up_what_waits() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    out.close()
    await asyncio.sleep(0)
    connection.room.set()
    await asyncio.sleep(0.01)
    assert not connection.got
