from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from syringa.http.server.request_cycle import Exchange
from syringa.http.streaming.writer import MOST_WAITING, ClientGone, Outlet


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


async def turns() -> None:
    """As often as anything here takes."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_parts_wait_for_the_end_of_the_turn_and_stay_apart() -> None:
    connection, other = Connection(), Connection()
    out, beside = outlet(connection), outlet(other)
    out.put(b"a")
    out.put(b"b")
    beside.put(b"x")
    assert not connection.got
    await turn()
    assert connection.got == [b"a", b"b"]
    assert other.got == [b"x"]
    out.put(b"c")
    await turn()
    out.put(b"d")
    assert not out.finish([b"e"])  # no exchange: it cannot be known whether it would wait
    await out.end([b"e", b"f"])
    assert connection.got == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert connection.ended
    await beside.end([b"y"])
    assert other.got == [b"x", b"y"]


class Straight:
    """An exchange that takes what it is given, while it has room."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.writes: list[list[bytes]] = []

    def write(self, parts: list[bytes]) -> bool:
        if not self._connection.room.is_set():
            return False
        if self._connection.broken:
            raise OSError("broken pipe")
        assert self._connection.started
        self.writes.append(parts[:])
        return True

    def finish(self, parts: list[bytes]) -> bool:
        done = self.write(parts)
        self._connection.ended |= done
        return done


async def test_with_an_exchange_the_parts_of_a_turn_are_one_write() -> None:
    connection = Connection()
    exchange = Straight(connection)
    out = Outlet(connection.send, connection.send, [], cast(Exchange, exchange))
    for part in (b"a", b"b"):
        out.put(part)
    await turn()
    out.put(b"c")
    await turn()
    connection.room.clear()
    out.put(b"d")
    await turn()
    assert out.behind
    out.put(b"e")
    assert not out.finish([b"f"])
    connection.room.set()
    await turns()
    assert not out.behind
    out.put(b"f")
    assert out.finish([b"g", b"h"])
    assert connection.ended
    assert exchange.writes[:2] == [[b"a", b"b"], [b"c"]]
    assert exchange.writes[-1] == [b"f", b"g", b"h"]
    assert b"".join([*connection.got, *(part for each in exchange.writes[2:] for part in each)]) == b"defgh"


async def test_an_exchange_that_breaks_is_told_of() -> None:
    connection = Connection()
    out = Outlet(connection.send, connection.send, [], cast(Exchange, Straight(connection)))
    out.put(b"a")
    await turn()
    connection.broken = True
    with pytest.raises(ClientGone):
        out.finish([b"z"])
    out.put(b"b")
    await turn()
    with pytest.raises(ClientGone):
        out.put(b"c")


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
    await turns()
    assert b"".join(connection.got) == b"".join(parts[:6])
    for part in parts[6:]:
        out.put(part)
    await out.end([b"!"])
    assert b"".join(connection.got) == b"".join(parts) + b"!"


async def test_the_end_waits_for_what_waits() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    await turn()
    out.put(b"b")
    end = asyncio.create_task(out.end([b"c"]))
    await turns()
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
        await out.end([b"d"])


async def test_a_connection_that_breaks_while_parts_wait() -> None:
    connection = Connection()
    out = outlet(connection)
    connection.room.clear()
    out.put(b"a")
    await turn()
    connection.broken = True
    connection.room.set()
    await turns()
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
    await turns()
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


class Paused(Straight):
    """An exchange whose client has to read first, each time."""

    def write(self, parts: list[bytes]) -> bool:
        return False


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("last", [[], [b"y"], [b"y", b"z"]])
async def test_the_end_comes_whole_and_once(started: bool, last: list[bytes]) -> None:
    """Also where there is nothing left to say, and where a flush is due while the end waits for its client."""
    connection = Connection()
    out = Outlet(connection.send, connection.send, [], cast(Exchange, Paused(connection)))
    if started:
        out.put(b"a")
        await turn()
    connection.room.clear()
    if started:
        out.put(b"b")
    assert not out.finish(last)
    end = asyncio.create_task(out.end(last))
    await turn()
    connection.room.set()
    await asyncio.wait_for(end, 30)
    await turn()
    assert connection.ended
    assert b"".join(connection.got) == (b"ab" if started else b"") + b"".join(last)
