from __future__ import annotations

import asyncio
from typing import Any

import pytest

from syringa.http.outlet import MOST_WAITING, ClientGone, Outlet


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


async def turn() -> None:
    """Lets the event loop come round."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_parts_of_one_turn_are_one_write() -> None:
    connection, other = Connection(), Connection()
    out, beside = outlet(connection), outlet(other)
    out.put(b"a")
    out.put(b"b")
    beside.put(b"x")
    assert not connection.got
    await turn()
    assert connection.got == [b"ab"]
    assert other.got == [b"x"]
    out.put(b"c")
    await turn()
    out.put(b"d")
    await out.end(b"e")
    assert connection.got == [b"ab", b"c", b"de"]
    assert connection.ended
    await beside.end(b"y")
    assert b"".join(other.got) == b"xy"


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_a_slow_client_gets_every_part_in_order(before: int) -> None:
    connection = Connection()
    out = outlet(connection)
    parts = [bytes([97 + each]) for each in range(9)]
    for part in parts[:before]:
        out.put(part)
        await turn()
    connection.room.clear()
    for part in parts[before:6]:
        out.put(part)
        await turn()
    assert connection.got == parts[:before]
    connection.room.set()
    await asyncio.sleep(0.01)
    assert b"".join(connection.got) == b"".join(parts[:6])
    for part in parts[6:]:
        out.put(part)
    await out.end(b"!")
    assert b"".join(connection.got) == b"".join(parts) + b"!"


async def test_the_end_waits_for_what_waits() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    await turn()
    out.put(b"b")
    end = asyncio.create_task(out.end(b"c"))
    await asyncio.sleep(0.01)
    assert not end.done()
    connection.room.set()
    await end
    assert b"".join(connection.got) == b"abc"


async def test_a_broken_connection_is_told() -> None:
    connection = Connection()
    out = outlet(connection)
    out.put(b"a")
    await turn()
    connection.broken = True
    out.put(b"b")
    await turn()
    with pytest.raises(ClientGone):
        out.put(b"c")
    with pytest.raises(ClientGone):
        await out.end(b"d")


async def test_a_connection_that_breaks_while_parts_wait() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    await turn()
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
    await turn()
    out.put(b"b")
    out.close()
    await turn()
    connection.room.set()
    await asyncio.sleep(0.01)
    assert not connection.got


async def test_a_client_that_does_not_read_is_given_up() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    await turn()
    assert out.behind
    for _ in range(4):
        out.put(bytes(MOST_WAITING // 4))
    with pytest.raises(ClientGone):
        out.put(b"b")
    out.close()
