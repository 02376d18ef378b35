from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from syringa.http.server.request_cycle import RequestCycle
from syringa.http.streaming.writer import MAX_BUFFERED_BYTES, ClientDisconnected, StreamWriter


class Client:
    """Receives ASGI messages. While `reads` is not set, `send` waits."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.started = self.ended = self.broken = False
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        if not self.reads.is_set():
            await self.reads.wait()
        if self.broken:
            raise OSError("broken pipe")
        if message["type"] == "http.response.start":
            self.started = True
        else:
            assert self.started
            assert not self.ended
            self.received.append(message["body"])
            self.ended = not message["more_body"]


class Cycle:
    """A request cycle that writes without waiting while its client reads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.writes: list[list[bytes]] = []
        self.sent: list[bytes] = []

    def write(self, parts: list[bytes]) -> bool:
        if not self._client.reads.is_set():
            return False
        if self._client.broken:
            raise OSError("broken pipe")
        assert self._client.started
        self.writes.append(parts[:])
        return True

    def finish(self, parts: list[bytes]) -> bool:
        done = self.write(parts)
        self._client.ended |= done
        return done

    async def send(self, message: Any) -> None:
        self.sent.append(message["body"])
        await self._client.send(message)


class BlockedCycle(Cycle):
    """A request cycle whose client always has to read first."""

    def write(self, parts: list[bytes]) -> bool:
        return False


def stream_writer(client: Client, cycle: Cycle | None = None) -> StreamWriter:
    return StreamWriter(client.send, [], cast(RequestCycle | None, cycle))


async def next_iteration() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def many_iterations() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_writer_sends_parts_separately_at_the_end_of_the_iteration() -> None:
    client, other = Client(), Client()
    writer, other_writer = stream_writer(client), stream_writer(other)
    writer.write(b"a")
    writer.write(b"b")
    other_writer.write(b"x")
    assert not client.received
    await next_iteration()
    assert client.received == [b"a", b"b"]
    assert other.received == [b"x"]
    writer.write(b"c")
    await next_iteration()
    writer.write(b"d")
    assert not writer.try_finish([b"e"])  # without a cycle, it is unknown whether it would wait
    await writer.finish([b"e", b"f"])
    assert client.received == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert client.ended
    await other_writer.finish([b"y"])
    assert other.received == [b"x", b"y"]


async def test_writer_with_cycle_sends_the_parts_of_an_iteration_in_one_write() -> None:
    client = Client()
    cycle = Cycle(client)
    writer = stream_writer(client, cycle)
    for part in (b"a", b"b"):
        writer.write(part)
    await next_iteration()
    writer.write(b"c")
    await next_iteration()
    client.reads.clear()
    writer.write(b"d")
    await next_iteration()
    assert writer.is_blocked
    writer.write(b"e")
    assert not writer.try_finish([b"f"])
    client.reads.set()
    await many_iterations()
    assert not writer.is_blocked
    writer.write(b"f")
    assert writer.try_finish([b"g", b"h"])
    assert client.ended
    assert cycle.writes[:2] == [[b"a", b"b"], [b"c"]]
    assert cycle.writes[-1] == [b"f", b"g", b"h"]
    assert b"".join([*client.received, *(part for each in cycle.writes[2:] for part in each)]) == b"defgh"


async def test_writer_with_cycle_sends_only_the_head_through_the_middleware() -> None:
    client = Client()
    cycle = BlockedCycle(client)
    kinds: list[str] = []

    async def send_through_middleware(message: Any) -> None:
        kinds.append(message["type"])
        await client.send(message)

    writer = StreamWriter(send_through_middleware, [], cast(RequestCycle, cycle))
    writer.write(b"a")
    await next_iteration()
    await writer.finish([b"b"])
    assert kinds == ["http.response.start"]
    assert cycle.sent == client.received == [b"a", b"b"]


async def test_writer_reports_a_broken_cycle() -> None:
    client = Client()
    writer = stream_writer(client, Cycle(client))
    writer.write(b"a")
    await next_iteration()
    client.broken = True
    with pytest.raises(ClientDisconnected):
        writer.try_finish([b"z"])
    writer.write(b"b")
    await next_iteration()
    with pytest.raises(ClientDisconnected):
        writer.write(b"c")


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_writer_sends_every_part_in_order_to_a_slow_client(before: int) -> None:
    client = Client()
    writer = stream_writer(client)
    parts = [bytes([97 + each]) for each in range(9)]
    for part in parts[:before]:
        writer.write(part)
        await next_iteration()
    client.reads.clear()
    for part in parts[before:6]:
        writer.write(part)
        await next_iteration()
    assert client.received == parts[:before]
    client.reads.set()
    await many_iterations()
    assert b"".join(client.received) == b"".join(parts[:6])
    for part in parts[6:]:
        writer.write(part)
    await writer.finish([b"!"])
    assert b"".join(client.received) == b"".join(parts) + b"!"


async def test_finish_waits_for_pending_parts() -> None:
    client = Client()
    writer = stream_writer(client)
    client.reads.clear()
    writer.write(b"a")
    await next_iteration()
    writer.write(b"b")
    finish = asyncio.create_task(writer.finish([b"c"]))
    await many_iterations()
    assert not finish.done()
    client.reads.set()
    await finish
    assert b"".join(client.received) == b"abc"


async def test_writer_raises_after_the_connection_broke() -> None:
    client = Client()
    writer = stream_writer(client)
    writer.write(b"a")
    await next_iteration()
    client.broken = True
    writer.write(b"b")
    await next_iteration()
    with pytest.raises(ClientDisconnected):
        writer.write(b"c")
    with pytest.raises(ClientDisconnected):
        await writer.finish([b"d"])


async def test_writer_raises_after_the_connection_broke_while_blocked() -> None:
    client = Client()
    writer = stream_writer(client)
    client.reads.clear()
    writer.write(b"a")
    await next_iteration()
    client.broken = True
    client.reads.set()
    await many_iterations()
    with pytest.raises(ClientDisconnected):
        writer.write(b"b")


async def test_close_discards_pending_parts() -> None:
    client = Client()
    writer = stream_writer(client)
    client.reads.clear()
    writer.write(b"a")
    await next_iteration()
    writer.write(b"b")
    writer.close()
    await next_iteration()
    client.reads.set()
    await many_iterations()
    assert not client.received


async def test_writer_gives_up_a_client_that_does_not_read() -> None:
    client = Client()
    writer = stream_writer(client)
    client.reads.clear()
    writer.write(b"a")
    await next_iteration()
    assert writer.is_blocked
    for _ in range(4):
        writer.write(bytes(MAX_BUFFERED_BYTES // 4))
    with pytest.raises(ClientDisconnected):
        writer.write(b"b")
    writer.close()


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("last", [[], [b"y"], [b"y", b"z"]])
async def test_finish_sends_everything_once(started: bool, last: list[bytes]) -> None:
    """Also with no last parts, and with a flush scheduled while `finish` waits for the client."""
    client = Client()
    writer = stream_writer(client, BlockedCycle(client))
    if started:
        writer.write(b"a")
        await next_iteration()
    client.reads.clear()
    if started:
        writer.write(b"b")
    assert not writer.try_finish(last)
    finish = asyncio.create_task(writer.finish(last))
    await next_iteration()
    client.reads.set()
    await asyncio.wait_for(finish, 30)
    await next_iteration()
    assert client.ended
    assert b"".join(client.received) == (b"ab" if started else b"") + b"".join(last)
