"""How much is parsed in one turn of the event loop, counted without a clock."""

from __future__ import annotations

from typing import Any, cast

import httptools
import pytest

from syringa.http.server import connection as http_connection
from syringa.http.server.read_scheduler import SLICE_BYTES, WORK_PER_TURN, ReadScheduler, SlicedReader
from tests.http.fake_transport import FakeTransport, ManualLoop, create_connection
from tests.http.server.test_request_cycle import run_tasks

MAX_EVENTS_PER_TURN = WORK_PER_TURN + SLICE_BYTES // 4  # the last slice may exceed the work of a turn
CHUNKED = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
TINY_CHUNK = b"1\r\nx\r\n"


class EventReader(SlicedReader):
    """Each byte is an event."""

    def __init__(self, reads: ReadScheduler) -> None:
        self._reads, self.transport = reads, FakeTransport()
        self.parsed = 0

    def parse_slice(self, data: bytes | memoryview) -> int:
        if data[0] == ord("!"):
            raise ValueError
        self.parsed += len(data)
        return len(data)

    def is_read_paused(self) -> bool:
        return False


def create_readers(number: int) -> tuple[ManualLoop, list[EventReader]]:
    loop = ManualLoop()
    reads = ReadScheduler(cast(Any, loop))
    return loop, [EventReader(reads) for _ in range(number)]


def test_scheduler_bounds_the_work_of_all_connections_in_a_turn() -> None:
    loop, readers = create_readers(20)
    total = 0
    for reader in readers:
        reader.data_received(b"x" * 10 * SLICE_BYTES)
    while True:
        parsed = sum(reader.parsed for reader in readers)
        assert parsed - total <= WORK_PER_TURN + SLICE_BYTES
        total = parsed
        if not loop.run_turn():
            break
    assert total == 20 * 10 * SLICE_BYTES
    assert not any(reader.transport.reading_paused for reader in readers)  # type: ignore[attr-defined]


def test_scheduler_lets_connections_take_turns() -> None:
    loop, (first, second) = create_readers(2)
    first.data_received(b"x" * 100 * SLICE_BYTES)
    second.data_received(b"x")
    assert second.parsed == 0, "the turn is spent"
    while not second.parsed:
        assert loop.run_turn()
    assert first.parsed <= 3 * SLICE_BYTES


def test_scheduler_parses_ordinary_requests_at_once() -> None:
    _, readers = create_readers(1000)
    for reader in readers:
        reader.data_received(b"x" * 20)
    assert all(reader.parsed == 20 for reader in readers)


def test_scheduler_drops_a_connection_that_fails_and_continues_with_others() -> None:
    loop, (first, second, third) = create_readers(3)
    first.data_received(b"x" * 3 * SLICE_BYTES)
    second.data_received(b"!" * 2 * SLICE_BYTES)
    third.data_received(b"x" * 2 * SLICE_BYTES)
    while loop.run_turn():
        pass
    assert second.transport.is_closing()
    assert (first.parsed, third.parsed) == (3 * SLICE_BYTES, 2 * SLICE_BYTES)


def test_reader_stops_reading_from_its_socket_until_its_data_is_parsed() -> None:
    loop, (reader,) = create_readers(1)
    transport = cast(FakeTransport, reader.transport)
    reader.data_received(b"x" * 3 * SLICE_BYTES)
    reader.data_received(b"y" * SLICE_BYTES)  # had been received before the pause
    paused = []
    while reader.has_unparsed_data:
        paused.append(transport.reading_paused)
        assert loop.run_turn()
    assert paused == [True] * len(paused)
    assert (transport.reading_paused, len(paused) > 1) == (False, True)
    assert reader.parsed == 4 * SLICE_BYTES


def test_lost_connection_is_not_parsed_further() -> None:
    loop, (reader,) = create_readers(1)
    reader.data_received(b"x" * 5 * SLICE_BYTES)
    reader.connection_lost(None)
    while loop.run_turn():
        pass
    assert reader.parsed == SLICE_BYTES


class CountedEvents:
    """Counts calls of a connection's parser callbacks."""

    def __init__(self, connection: Any, *names: str) -> None:
        self.count = 0
        for name in names:
            setattr(connection, name, self._counting(getattr(connection, name)))

    def _counting(self, callback: Any) -> Any:
        def counted(*arguments: Any) -> None:
            self.count += 1
            callback(*arguments)

        return counted


async def waiting_app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] == "http.request":
        pass


async def disconnect(connection: Any) -> None:
    connection.connection_lost(None)
    await run_tasks()


@pytest.mark.parametrize(
    ("sent", "least"),
    [
        (CHUNKED + TINY_CHUNK * 40_000, 40_000),
        (b"GET /x HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * 40_000, 10_000),  # rejected after 64 KiB
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n" * 10_000, 32),  # rejected after 32
    ],
)
async def test_http_connection_parses_a_flood_in_slices(sent: bytes, least: int) -> None:
    loop = ManualLoop()
    connection, transport = create_connection(waiting_app, loop)
    events = CountedEvents(connection, "on_header", "on_body", "on_message_begin")
    connection.parser = httptools.HttpRequestParser(connection)
    before = 0
    connection.data_received(sent)
    while True:
        assert events.count - before <= MAX_EVENTS_PER_TURN
        before = events.count
        await run_tasks()
        if not loop.run_turn():
            break
    assert events.count >= least
    assert not transport.reading_paused
    await disconnect(connection)


async def refusing_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def test_early_response_to_a_chunked_body_ends_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LINGER_SECONDS", 0.0)
    connection, transport = create_connection(refusing_app)
    connection.data_received(CHUNKED)
    body = CountedEvents(connection, "on_body")
    connection.parser = httptools.HttpRequestParser(connection)
    await run_tasks()
    assert b"connection: close\r\n" in transport.text
    assert transport.ended
    connection.data_received(TINY_CHUNK * 1000)
    assert transport.reading_paused, "one read in each turn"
    await run_tasks()
    assert not body.count
    assert transport.closed


@pytest.mark.parametrize(("length", "keeps"), [(100_000, True), (2 << 20, False)])
async def test_early_response_keeps_the_connection_if_the_rest_of_the_body_is_short(length: int, keeps: bool) -> None:
    connection, transport = create_connection(refusing_app)
    connection.data_received(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % length)
    await run_tasks()
    assert (b"connection: close\r\n" not in transport.text) == keeps
    assert transport.ended != keeps
    if keeps:
        connection.data_received(b"x" * length + b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
        await run_tasks()
        assert transport.text.count(b"HTTP/1.1 401") == 2


async def test_body_is_read_further_only_after_its_received_part_is_parsed() -> None:
    """An app that reads quickly does not make the connection receive more than it can parse."""
    loop = ManualLoop()
    connection, transport = create_connection(waiting_app, loop)
    connection.data_received(CHUNKED + TINY_CHUNK * 20_000)
    while connection.has_unparsed_data:
        connection.flow.pause_reading()
        await run_tasks()  # the app calls receive, which resumes the flow
        connection.flow.resume_reading()
        assert transport.reading_paused
        assert loop.run_turn()
    connection.flow.resume_reading()
    assert not transport.reading_paused
    await disconnect(connection)


async def test_connection_with_unparsed_data_is_not_idle() -> None:
    loop = ManualLoop()
    connection, transport = create_connection(refusing_app, loop)
    busy, _ = create_connection(waiting_app)
    busy._reads = connection._reads
    request = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
    connection.data_received(request)
    await run_tasks()
    assert connection.idle
    busy.data_received(CHUNKED + TINY_CHUNK * 10_000)  # takes the turn
    connection.data_received(request)
    assert not connection.idle
    connection.shutdown()
    while loop.run_turn():
        await run_tasks()
    assert transport.text.count(b"HTTP/1.1 401") == 2
    await disconnect(busy)
