"""Slow, broken and hostile requests, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from typing import Any

import pytest

from syringa.http.context import CONNECTION
from syringa.http.server import connection as connection_module
from syringa.http.server import server as serving
from syringa.http.server.connection import MIN_UPLOAD_RATE
from tests.client import eventually, settle, until, with_patience
from tests.fake_engine import FakeEngine
from tests.http.fake_transport import create_connection
from tests.http.raw_client import BODY, COMPLETION_REQUEST, HEAD, HEALTH_REQUEST, running_server


@pytest.fixture(autouse=True)
def _slow_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may take longer than usual to send the rest of a request that was rejected."""
    monkeypatch.setattr(connection_module, "_LINGER_SECONDS", 60.0)


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"GET", b"GET /health HTTP/1.1\r\nhost: localhost\r\n", HEAD + b"content-length: 9\r\n\r\n{"]
)
async def test_connection_times_out_incomplete_requests(sent: bytes) -> None:
    async with running_server(read_timeout=0.3) as server:
        async with server.client(sent) as client:
            await client.expect_rejection(408, "request_timeout")

        async def complete_request_succeeds() -> bool:  # on a loaded machine, it may take longer than the timeout
            async with server.client(COMPLETION_REQUEST) as client:
                return (await client.response())[0] == 200

        await until(complete_request_succeeds)
        assert not server.engine.running


async def test_read_timeout_covers_the_whole_request() -> None:
    async with running_server(read_timeout=0.3) as server, server.client(HEAD) as client:

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    client.send(b"x-a: b\r\n")
                    await client.writer.drain()
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        await client.expect_rejection(408, "request_timeout")
        trickling.cancel()


async def test_connection_accepts_a_slow_request_within_the_timeout() -> None:
    async with running_server(read_timeout=60) as server, server.client() as client:
        for each in COMPLETION_REQUEST:
            client.send(bytes([each]))
            await asyncio.sleep(0.0005)
        assert (await client.response())[0] == 200
        client.send(COMPLETION_REQUEST)
        assert (await client.response())[0] == 200


async def test_read_timeout_can_be_disabled() -> None:
    async with running_server(read_timeout=0) as server, server.client(HEAD) as client:
        await asyncio.sleep(0.5)
        client.send(COMPLETION_REQUEST.removeprefix(HEAD))
        assert (await client.response())[0] == 200


async def test_read_timeout_does_not_cover_the_response() -> None:
    async def check(seconds: float) -> None:
        engine = FakeEngine("hello", delay=seconds / 4)
        async with running_server(engine, read_timeout=seconds) as server, server.client(COMPLETION_REQUEST) as client:
            assert (await client.response())[0] == 200
            await asyncio.sleep(1.2 * seconds)  # idle for longer than the read timeout
            client.send(COMPLETION_REQUEST)
            assert (await client.response())[0] == 200

    await with_patience(check)


async def test_keep_alive_timeout_ends_with_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout ends when the next request begins. Empty lines do not begin one."""

    async def check(seconds: float) -> None:
        monkeypatch.setattr(serving, "_KEEP_ALIVE_SECONDS", seconds)
        engine = FakeEngine("hello", delay=seconds / 4)
        async with running_server(engine) as server, server.client(HEALTH_REQUEST) as client:
            for sent in (b"", COMPLETION_REQUEST, COMPLETION_REQUEST):  # each takes longer than the timeout
                client.send(sent)
                assert (await client.response())[0] == 200
            async with asyncio.timeout(60):
                while not await client.is_closed(0.1):
                    with contextlib.suppress(RuntimeError):  # raised by uvloop after the close
                        client.send(b"\r\n")

    await with_patience(check)


async def test_incomplete_body_is_accounted_as_cancelled() -> None:
    async with running_server(read_timeout=0.3) as server:
        async with server.client(HEAD + b"content-length: 9\r\n\r\n{") as client:
            await client.expect_rejection(408, "request_timeout")
        assert await eventually(lambda: server.accounting)
        assert server.accounting[0].outcome == "cancelled"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /caf\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: local host\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: evil@localhost\r\n\r\n",
        # What a proxy in front might understand differently
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 5\r\n\r\n",
        HEAD + b"content-length: 5, 5\r\n\r\n",
        HEAD + b"content-length: +5\r\n\r\n",
        HEAD + b"content-length : 5\r\n\r\n",
        HEAD + b"transfer-encoding: gzip\r\n\r\n",
        HEAD + b"transfer-encoding: identity\r\n\r\n",
        HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding:\r\n chunked\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n",
        HEAD + b"x-a: b\r\n folded\r\n\r\n",
        HEAD + b"x-a: b\rx-b: c\r\n\r\n",
        HEAD + b"x-a: b\nx-b: c\r\n\r\n",
        HEAD + b"x-a : b\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\nx\n0\n\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;a\nb\r\nx\r\n0\r\n\r\n",
    ],
)
async def test_connection_rejects_malformed_requests(sent: bytes) -> None:
    async with running_server() as server, server.client(sent) as client:
        await client.expect_rejection(400, "malformed_request")


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked", b"x, Chunked"])
async def test_connection_does_not_implement_other_transfer_codings(coding: bytes) -> None:
    sent = HEAD + b"transfer-encoding: " + coding + b"\r\n\r\n0\r\n\r\n"
    async with running_server() as server, server.client(sent) as client:
        await client.expect_rejection(501, "unsupported_transfer_encoding")


async def test_http_1_0_request_needs_no_host() -> None:
    async with running_server() as server, server.client(b"GET /health HTTP/1.0\r\n\r\n") as client:
        assert (await client.response())[0] == 200


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_early_rejection_reaches_a_client_that_sends_its_whole_body_first(connection: str) -> None:
    def post(port: int) -> int:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(client):
            headers = {"content-type": "application/json", "connection": connection}
            client.request("POST", "/v1/completions", b"x" * 20_000_000, headers)
            return client.getresponse().status

    async with running_server(max_body_bytes=1000) as server:
        assert await asyncio.to_thread(post, server.port) == 413


async def test_connection_limits_chunk_framing() -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    async with running_server(max_body_bytes=1000) as server:
        async with server.client(chunked + b"ffffffffffff\r\n" + b"x" * 2000) as client:
            assert (await client.response())[0] == 413
        async with server.client(chunked + b"1;" + b"x" * (1 << 20)) as client:  # all extension
            await client.expect_rejection(431, "headers_too_large")
        async with server.client(chunked + b"0\r\nx: " + b"x" * (1 << 20)) as client:  # all trailer
            await client.expect_rejection(431, "headers_too_large")
        async with server.client(chunked + b"".join(b"1\r\n%c\r\n" % each for each in BODY) + b"0\r\n\r\n") as client:
            assert (await client.response())[0] == 200


async def test_connection_ignores_trailers() -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    async with running_server(api_key=("secret",)) as server, server.client() as client:
        client.send(chunked + b"authorization: Bearer secret\r\nx-request-id: forged\r\n\r\n")
        status, headers, _ = await client.response()
        assert (status, headers["x-request-id"] == "forged") == (401, False)


async def test_connection_limits_the_head() -> None:
    async with running_server() as server:
        async with server.client(HEALTH_REQUEST[:-2] + b"x-a: " + b"x" * 60_000 + b"\r\n\r\n") as client:
            assert (await client.response())[0] == 200
            client.send(HEALTH_REQUEST[:-2] + b"x-a: " + b"x" * 70_000 + b"\r\n\r\n")
            await client.expect_rejection(431, "headers_too_large")
        async with server.client(HEALTH_REQUEST[:-2] + b"x-a: " + b"x" * 700_000) as client:  # incomplete
            await client.expect_rejection(431, "headers_too_large")
        async with server.client(HEALTH_REQUEST[:-2] + b"a: b\r\n" * 200_000) as client:
            await client.expect_rejection(431, "headers_too_large")
        async with server.client(b"GET /health?" + b"x" * 8000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n") as client:
            assert (await client.response())[0] == 200
        async with server.client(b"GET /health?" + b"x" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n") as client:
            await client.expect_rejection(414, "target_too_long")
        async with server.client(b"GET /" + b"x" * 700_000) as client:
            await client.expect_rejection(431, "headers_too_large")


async def test_rejection_reaches_a_client_that_is_still_sending_its_head() -> None:
    """An immediate close would make the client's kernel discard the response."""
    async with running_server() as server, server.client() as client:
        client.writer.transport.pause_reading()
        client.send(HEALTH_REQUEST[:-2] + b"a: b\r\n" * 1_000_000)
        await asyncio.sleep(0.3)
        client.writer.transport.resume_reading()
        await client.expect_rejection(431, "headers_too_large")


UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def test_connection_rejects_invalid_websocket_handshakes() -> None:
    async with running_server() as server:
        for more in (b"a: b\r\n" * 130, b"a: " + b"x" * 9000 + b"\r\n"):
            async with server.client(UPGRADE + more + b"\r\n") as client:
                await client.expect_rejection(431, "headers_too_large")
        for old, new, status, code in (
            (b"GET", b"POST", 405, "handshake_failed"),
            (b"sec-websocket-key", b"x-a", 400, "handshake_failed"),
            (b"version: 13", b"version: 12", 400, "handshake_failed"),
            (b"upgrade\r\n", b"upgrade\r\nsec-websocket-key: a\r\n", 400, "handshake_failed"),
            (b"upgrade\r\n", b"upgrade\r\norigin: http://[\r\n", 403, "origin_not_allowed"),
            (b"/v1/responses", b"/v1/models", 404, None),
            (b"/v1/responses", b"/nothing", 404, None),
        ):
            async with server.client(UPGRADE.replace(old, new, 1) + b"\r\n") as client:
                found, headers, body = await client.response()
                assert (found, headers["content-type"]) == (status, "application/json")
                error = json.loads(body)["error"]
                assert error["code"] == code
                assert error["message"]
                assert await client.is_closed()


async def test_read_timeout_does_not_apply_to_websockets() -> None:
    async def check(seconds: float) -> None:
        async with running_server(read_timeout=seconds) as server, server.client(UPGRADE + b"\r\n") as client:
            assert b"101" in await client.reader.readline()
            await asyncio.sleep(1.2 * seconds)
            client.send(b"\x89\x80\x00\x00\x00\x00")  # a ping
            assert await asyncio.wait_for(client.reader.readuntil(b"\x8a\x00"), 60)

    await with_patience(check)


@pytest.mark.parametrize("cut", [0, 20, len(HEAD), -3])
async def test_connection_ignores_other_upgrades(cut: int) -> None:
    """Java's HTTP client offers HTTP/2 with every first request."""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    request = COMPLETION_REQUEST.replace(b"host: localhost\r\n", b"host: localhost\r\n" + upgrade)
    async with running_server() as server, server.client(request[:cut]) as client:
        await settle()
        client.send(request[cut:] + COMPLETION_REQUEST)
        for _ in range(2):
            status, _, body = await client.response()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")
        client.send(HEALTH_REQUEST.replace(b"host: localhost\r\n", b"host: localhost\r\n" + upgrade))
        assert (await client.response())[0] == 200


async def test_connection_responds_to_pipelined_requests_in_order() -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with running_server(engine) as server, server.client(COMPLETION_REQUEST * 5 + HEALTH_REQUEST) as client:
        for _ in range(5):
            assert b"hello" in (await client.response())[2]
        assert (await client.response())[2] == b'{"status":"ok"}'


async def test_read_timeout_excludes_time_without_reading() -> None:
    """While the first response takes longer than the read timeout, most of the second request is not read."""
    body = BODY + b" " * 900_000
    large = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body

    async def check(seconds: float) -> None:
        engine, sent = FakeEngine("hello", delay=seconds / 4), COMPLETION_REQUEST + large
        async with running_server(engine, read_timeout=seconds) as server, server.client(sent) as client:
            for _ in range(2):
                assert (await client.response())[0] == 200

    await with_patience(check)


async def test_upload_may_take_longer_than_the_read_timeout_while_it_goes_on() -> None:
    """The timer is expired by hand: what counts is how much has arrived since the last time."""

    async def receive_forever(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][CONNECTION].expect_upload()
        while (await receive())["type"] == "http.request":
            pass

    connection, transport = create_connection(receive_forever)
    connection._limits.read_timeout = 10.0
    enough = MIN_UPLOAD_RATE * 10
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
    await asyncio.sleep(0)
    for _ in range(3):
        connection.data_received(b"x" * enough)
        await settle()
        connection._read_timed_out()
        assert not transport.writes
    connection.data_received(b"x" * (enough - 1))
    await settle()
    connection._read_timed_out()
    assert transport.text.startswith(b"HTTP/1.1 408")
    connection.connection_lost(None)


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        (b"\x00\x01", 400, "malformed_request"),
        (b"GET", 408, "request_timeout"),
        (HEAD + b"content-length: 9\r\n\r\n{", 408, "request_timeout"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400, "malformed_request"),
        (UPGRADE + b"\r\n", 400, "malformed_request"),
    ],
)
@pytest.mark.parametrize("good", [1, 3])
async def test_connection_sends_a_rejection_after_earlier_responses(
    bad: bytes, status: int, code: str, good: int
) -> None:
    async def check(seconds: float) -> None:
        engine, sent = FakeEngine("hello", delay=seconds / 10), COMPLETION_REQUEST * good + bad
        async with running_server(engine, read_timeout=seconds) as server, server.client(sent) as client:
            for _ in range(good):
                answer, _, body = await client.response()
                assert answer == 200
                assert json.loads(body)["choices"][0]["text"] == "hello"
            await client.expect_rejection(status, code)
        assert len(engine.requests) == good

    await with_patience(check)


async def test_connection_limits_pipelined_requests() -> None:
    engine = FakeEngine("hello", delay=0.1)
    async with running_server(engine) as server, server.client(COMPLETION_REQUEST + HEALTH_REQUEST * 99) as client:
        assert (await client.response())[0] == 200
        for _ in range(32):
            assert (await client.response())[2] == b'{"status":"ok"}'
        await client.expect_rejection(400, "too_many_pipelined")


async def test_disconnect_discards_pipelined_requests() -> None:
    engine = FakeEngine("hello", delay=0.02)
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True}).encode()
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with running_server(engine) as server:
        async with server.client(request * 3):
            assert await eventually(lambda: engine.running)
        assert await eventually(lambda: not engine.running)
        await settle()
        assert len(engine.requests) == 1


async def test_socket_is_read_after_a_long_body_so_that_a_disconnect_is_noticed() -> None:
    bodies: list[int] = []

    async def read_body_and_wait(scope: Any, receive: Any, send: Any) -> None:
        received, message = 0, {"more_body": True}
        while message["more_body"]:
            message = await receive()
            received += len(message["body"])
        bodies.append(received)
        await asyncio.Event().wait()

    connection, transport = create_connection(read_body_and_wait)
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100001\r\n\r\nx")
    await settle()
    connection.data_received(b"x" * 100_000)  # more than is held before the app reads it
    assert await eventually(lambda: bodies)
    assert not transport.reading_paused
    connection.data_received(HEALTH_REQUEST)
    assert transport.reading_paused, "until the next request is begun"
    connection.connection_lost(None)
    await settle()
    assert bodies == [100_001]
