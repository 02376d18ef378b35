from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httptools
import pytest

from syringa.http.context import REQUEST_CYCLE
from syringa.http.server.request_cycle import RequestCycle
from tests.client import eventually
from tests.http.fake_transport import create_connection


def responding_app(*parts: bytes, status: int = 200, headers: Any = (), pause: float | None = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        if pause is not None:
            await asyncio.sleep(pause)
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    return app


async def run_tasks() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
SIZED = [(b"content-length", b"5")]


async def test_cycle_writes_head_and_body_together() -> None:
    connection, transport = create_connection(responding_app(b"hello", headers=SIZED))
    connection.data_received(GET)
    await run_tasks()
    assert len(transport.writes) == 1
    assert transport.text.startswith(b"HTTP/1.1 200 OK\r\n")
    assert transport.text.endswith(b"\r\n\r\nhello")
    connection.data_received(GET)
    await run_tasks()
    assert len(transport.writes) == 2
    assert transport.writes[0] == transport.writes[1]
    assert not transport.closed


async def test_cycle_writes_each_part_of_a_stream() -> None:
    connection, transport = create_connection(responding_app(b"a", b"b", b"c"))
    connection.data_received(GET)
    await run_tasks()
    assert len(transport.writes) == 3
    assert transport.writes[0].endswith(b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    assert transport.writes[1:] == [b"1\r\nb\r\n", b"1\r\nc\r\n0\r\n\r\n"]
    assert connection.cycle.transport is transport


async def test_cycle_delays_the_head_until_the_body() -> None:
    connection, transport = create_connection(responding_app(b"hello", headers=SIZED, pause=0.05))
    connection.data_received(GET)
    await run_tasks()
    assert not transport.writes
    assert await eventually(lambda: transport.writes)
    assert len(transport.writes) == 1
    assert transport.text.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
@pytest.mark.parametrize("close", [False, True])
async def test_cycle_sends_responses_without_body(method: bytes, status: int, close: bool) -> None:
    headers = SIZED if method == b"HEAD" else []
    connection, transport = create_connection(
        responding_app(b"hello" if headers else b"", status=status, headers=headers)
    )
    more = b"connection: close\r\n" if close else b""
    connection.data_received(method + b" /x HTTP/1.1\r\nhost: a\r\n" + more + b"\r\n")
    await run_tasks()
    assert transport.text.startswith(b"HTTP/1.1 %d" % status)
    assert transport.text.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in transport.text
    assert transport.closed is close
    assert (b"connection: close" in transport.text) is close


async def test_cycle_does_not_copy_a_large_body() -> None:
    body = bytes(1 << 20)
    connection, transport = create_connection(
        responding_app(body, headers=[(b"content-length", str(len(body)).encode())])
    )
    connection.data_received(GET)
    await run_tasks()
    assert [len(each) for each in transport.writes][1:] == [1 << 20]


async def test_cycle_closes_the_connection_if_the_app_fails_after_the_head() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/later":
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise ValueError("no")

    for path, ending in (("/now", b""), ("/later", b"\r\n\r\n1\r\na\r\n")):
        connection, transport = create_connection(app)
        connection.data_received(GET.replace(b"/x", path.encode()))
        await run_tasks()
        assert transport.text.endswith(ending)
        assert bool(transport.text) is bool(ending)
        assert transport.closed


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "http.response.body", "body": b"a"}],
        [{"type": "http.response.start", "status": 200, "headers": []}] * 2,
        [{"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nb: c")]}],
        [{"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\nb: c")]}],
        [{"type": "http.response.start", "status": 200, "headers": SIZED}, {"type": "http.response.body"}],
        [
            {"type": "http.response.start", "status": 200, "headers": SIZED},
            {"type": "http.response.body", "body": b"longer"},
        ],
        [
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body"},
            {"type": "http.response.body"},
        ],
    ],
)
async def test_cycle_rejects_invalid_message_sequences(messages: list[Any]) -> None:
    errors: list[Exception] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages[:-1]:
            await send(message)
        try:
            await send(messages[-1])
        except RuntimeError as error:
            errors.append(error)
            raise

    connection, transport = create_connection(app)
    connection.data_received(GET)
    await run_tasks()
    assert errors
    assert b"b: c" not in transport.text
    assert b"longer" not in transport.text


async def test_cycle_writes_without_waiting() -> None:
    cycles: list[RequestCycle] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cycles.append(scope["extensions"][REQUEST_CYCLE])
        assert not cycles[0].write([b"x"])  # the response has not started
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert cycles[0].write([b"a", b"aa"])
        await asyncio.Event().wait()

    connection, transport = create_connection(app)
    connection.data_received(GET)
    await run_tasks()
    (cycle,) = cycles
    connection.pause_writing()
    assert not cycle.write([b"b"])
    assert not cycle.finish([b"b"])
    assert len(transport.writes) == 1
    assert transport.text.endswith(b"\r\n\r\n1\r\na\r\n2\r\naa\r\n")
    connection.resume_writing()
    assert cycle.write([b"b"])
    assert cycle.finish([b"c"])
    assert transport.text.endswith(b"2\r\naa\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n")
    assert cycle.response_complete


@pytest.mark.parametrize("complete", [False, True])
async def test_cycle_reports_a_disconnect_before_the_end(complete: bool) -> None:
    disconnects: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cycle = scope["extensions"][REQUEST_CYCLE]
        cycle.on_disconnect = lambda: disconnects.append(cycle.disconnected)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": not complete})
        await asyncio.sleep(0.02)
        assert cycle.write([b"b"])  # discarded

    connection, transport = create_connection(app)
    connection.data_received(GET)
    await run_tasks()
    written = len(transport.writes)
    connection.connection_lost(None)
    assert disconnects == ([] if complete else [True])
    if not complete:
        await asyncio.sleep(0.05)
        assert len(transport.writes) == written


async def test_connection_sends_pipelined_responses_in_order() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.02 if scope["path"] == "/1" else 0)
        headers = [] if scope["method"] == "HEAD" else SIZED
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = scope["path"].encode() * 2 + b"!" if headers else b""
        await send({"type": "http.response.body", "body": body})

    connection, transport = create_connection(app)
    connection.data_received(b"".join(b"%s /%d HTTP/1.1\r\nhost: a\r\n\r\n" % (b"GET", each) for each in (1, 2, 3)))
    assert await eventually(lambda: len(transport.writes) == 3)
    bodies = [each.rpartition(b"\r\n\r\n")[2] for each in transport.writes]
    assert bodies == [b"/1/1!", b"/2/2!", b"/3/3!"]


@pytest.mark.parametrize("reads", [True, False])
async def test_cycle_handles_expect_100_continue(reads: bool) -> None:
    """An early response without `100 Continue` closes the connection: a body or another request may follow."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if reads:
            assert (await receive())["body"] == b"hello"
        await send({"type": "http.response.start", "status": 200, "headers": SIZED})
        await send({"type": "http.response.body", "body": b"hello"})

    connection, transport = create_connection(app)
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    await run_tasks()
    if reads:
        assert transport.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
        connection.data_received(b"hello")
        await run_tasks()
    assert len(transport.writes) == 1 + reads
    assert transport.text.endswith(b"\r\n\r\nhello")
    assert transport.ended is not reads  # and closed after a moment
    assert (b"connection: close" in transport.text) is not reads


def test_parser_chains_errors_of_its_callbacks() -> None:
    """`HttpConnection` relies on the error of a callback being the context of the parser's own error."""

    def on_url(url: bytes) -> None:
        raise KeyError("x")

    with pytest.raises(httptools.HttpParserError) as caught:
        httptools.HttpRequestParser(SimpleNamespace(on_url=on_url)).feed_data(GET)
    assert isinstance(caught.value.__context__, KeyError)


async def test_cycle_sends_no_chunks_to_http_1_0() -> None:
    connection, transport = create_connection(responding_app(b"a", b"b"))
    connection.data_received(b"GET /x HTTP/1.0\r\nhost: a\r\n\r\n")
    await run_tasks()
    head, _, body = transport.text.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"ab"
    assert transport.closed
