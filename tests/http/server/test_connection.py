"""Requests that are slow, broken or hostile, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json

import pytest

from syringa.http.server import server as serving
from tests.client import eventually
from tests.fake_engine import FakeEngine
from tests.http.raw import ASK, BODY, HEAD, HEALTH, place


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"GET", b"GET /health HTTP/1.1\r\nhost: a\r\n", HEAD + b"content-length: 9\r\n\r\n{"]
)
async def test_what_does_not_arrive_in_time(sent: bytes) -> None:
    async with place() as here:
        async with here.client(sent) as client:
            await client.refused(408, "request_timeout")
        async with here.client(ASK) as client:
            assert (await client.answer())[0] == 200
        assert not here.engine.running


async def test_a_request_that_trickles_has_the_same_time() -> None:
    async with place() as here, here.client(HEAD) as client:

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    client.send(b"x-a: b\r\n")
                    await client.writer.drain()
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        await client.refused(408, "request_timeout")
        trickling.cancel()


async def test_a_request_that_is_slow_but_in_time_is_answered() -> None:
    async with place(read_timeout=5) as here, here.client() as client:
        for each in ASK:
            client.send(bytes([each]))
            await asyncio.sleep(0.0005)
        assert (await client.answer())[0] == 200
        client.send(ASK)
        assert (await client.answer())[0] == 200


async def test_without_a_limit_nobody_is_hurried() -> None:
    async with place(read_timeout=0) as here, here.client(HEAD) as client:
        await asyncio.sleep(0.5)
        client.send(ASK.removeprefix(HEAD))
        assert (await client.answer())[0] == 200


async def test_the_limit_is_for_the_request_and_not_for_its_answer() -> None:
    engine = FakeEngine("hello", delay=0.15)
    async with place(engine) as here, here.client(ASK) as client:
        assert (await client.answer())[0] == 200
        await asyncio.sleep(0.4)  # kept alive, without a word, for longer than a request may take
        client.send(ASK)
        assert (await client.answer())[0] == 200


async def test_a_kept_connection_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when a next request begins, which empty lines do not."""
    monkeypatch.setattr(serving, "_KEEP_ALIVE_SECONDS", 0.3)
    engine = FakeEngine("hello", delay=0.1)
    async with place(engine, read_timeout=30) as here, here.client(HEALTH) as client:
        for sent in (b"", ASK, ASK):  # each takes longer than that
            client.send(sent)
            assert (await client.answer())[0] == 200
        async with asyncio.timeout(30):
            while not await client.closed(0.1):
                with contextlib.suppress(RuntimeError):  # what uvloop says when it has closed
                    client.send(b"\r\n")


async def test_a_body_that_stops_is_in_the_books_as_left() -> None:
    async with place() as here:
        async with here.client(HEAD + b"content-length: 9\r\n\r\n{") as client:
            await client.refused(408, "request_timeout")
        assert await eventually(lambda: here.accounts)
        assert here.accounts[0].outcome == "cancelled"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /caf\xc3\xa9 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
async def test_malformed_requests(sent: bytes) -> None:
    async with place() as here, here.client(sent) as client:
        await client.refused(400, "malformed_request")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_client_that_sends_all_before_it_listens_hears_why_it_was_refused(connection: str) -> None:
    def post(port: int) -> int:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(client):
            headers = {"content-type": "application/json", "connection": connection}
            client.request("POST", "/v1/completions", b"x" * 20_000_000, headers)
            return client.getresponse().status

    async with place(read_timeout=30, max_body_bytes=1000) as here:
        assert await asyncio.to_thread(post, here.port) == 413


async def test_absurd_chunks_are_no_way_around_the_limits() -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    async with place(read_timeout=5, max_body_bytes=1000) as here:
        async with here.client(chunked + b"ffffffffffff\r\n" + b"x" * 2000) as client:
            assert (await client.answer())[0] == 413
        async with here.client(chunked + b"1;" + b"x" * (1 << 20)) as client:  # all extension
            await client.refused(431, "headers_too_large")
        async with here.client(chunked + b"0\r\nx: " + b"x" * (1 << 20)) as client:  # all trailer
            await client.refused(431, "headers_too_large")
        async with here.client(chunked + b"".join(b"1\r\n%c\r\n" % each for each in BODY) + b"0\r\n\r\n") as client:
            assert (await client.answer())[0] == 200


async def test_trailers_are_no_headers() -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    async with place(api_key=("secret",)) as here, here.client() as client:
        client.send(chunked + b"authorization: Bearer secret\r\nx-request-id: forged\r\n\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["x-request-id"] == "forged") == (401, False)


async def test_long_heads() -> None:
    async with place(read_timeout=5) as here:
        async with here.client(HEALTH[:-2] + b"x-a: " + b"x" * 60_000 + b"\r\n\r\n") as client:
            assert (await client.answer())[0] == 200
            client.send(HEALTH[:-2] + b"x-a: " + b"x" * 70_000 + b"\r\n\r\n")
            await client.refused(431, "headers_too_large")
        async with here.client(HEALTH[:-2] + b"x-a: " + b"x" * 700_000) as client:  # without an end
            await client.refused(431, "headers_too_large")
        async with here.client(HEALTH[:-2] + b"a: b\r\n" * 200_000) as client:
            await client.refused(431, "headers_too_large")
        async with here.client(b"GET /health?" + b"x" * 8000 + b" HTTP/1.1\r\nhost: a\r\n\r\n") as client:
            assert (await client.answer())[0] == 200
        async with here.client(b"GET /health?" + b"x" * 9000 + b" HTTP/1.1\r\nhost: a\r\n\r\n") as client:
            await client.refused(414, "target_too_long")
        async with here.client(b"GET /" + b"x" * 700_000) as client:
            await client.refused(431, "headers_too_large")


async def test_a_refusal_reaches_a_client_that_first_sends_all_it_has() -> None:
    """Closing at once would make its kernel forget what came before."""
    async with place(read_timeout=5) as here, here.client() as client:
        client.writer.transport.pause_reading()
        client.send(HEALTH[:-2] + b"a: b\r\n" * 1_000_000)
        await asyncio.sleep(0.3)
        client.writer.transport.resume_reading()
        await client.refused(431, "headers_too_large")


UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def test_handshakes_that_the_second_parser_would_choke_on() -> None:
    async with place() as here:
        for more in (b"a: b\r\n" * 130, b"a: " + b"x" * 9000 + b"\r\n"):
            async with here.client(UPGRADE + more + b"\r\n") as client:
                await client.refused(431, "headers_too_large")
        async with here.client(UPGRADE.replace(b"GET", b"POST", 1) + b"\r\n") as client:
            assert b"405" in await client.reader.readline()
        async with here.client(UPGRADE.replace(b"sec-websocket-key", b"x-a") + b"\r\n") as client:
            assert b"400" in await client.reader.readline()
        async with here.client(UPGRADE + b"\r\n") as client:
            assert b"101" in await client.reader.readline()
            await asyncio.sleep(0.5)  # the time for requests is not for it
            client.send(b"\x89\x80\x00\x00\x00\x00")  # a ping
            assert await asyncio.wait_for(client.reader.readuntil(b"\x8a\x00"), 30)


@pytest.mark.parametrize("cut", [0, 20, len(HEAD), -3])
async def test_an_offer_to_speak_something_else_is_overlooked(cut: int) -> None:
    """Java's client offers HTTP/2 with every first request."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    ask = ASK.replace(b"host: a\r\n", b"host: a\r\n" + offer)
    async with place() as here, here.client(ask[:cut]) as client:
        await asyncio.sleep(0.02)
        client.send(ask[cut:] + ASK)
        for _ in range(2):
            status, _, body = await client.answer()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")
        client.send(HEALTH.replace(b"host: a\r\n", b"host: a\r\n" + offer))
        assert (await client.answer())[0] == 200


async def test_pipelined_requests_are_answered_in_turn() -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with place(engine) as here, here.client(ASK * 5 + HEALTH) as client:
        for _ in range(5):
            assert b"hello" in (await client.answer())[2]
        assert (await client.answer())[2] == b'{"status":"ok"}'


async def test_a_pipelined_body_that_waits_for_its_turn_is_not_late() -> None:
    """While the first answer takes longer than a request may, most of the second request is not read."""
    engine = FakeEngine("hello", delay=0.1)
    body = BODY + b" " * 900_000
    large = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with place(engine) as here, here.client(ASK + large) as client:
        for _ in range(2):
            assert (await client.answer())[0] == 200


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
async def test_nonsense_behind_requests_is_answered_in_its_turn(bad: bytes, status: int, code: str, good: int) -> None:
    engine = FakeEngine("hello", delay=0.1)
    async with place(engine) as here, here.client(ASK * good + bad) as client:
        for _ in range(good):
            answer, _, body = await client.answer()
            assert answer == 200
            assert json.loads(body)["choices"][0]["text"] == "hello"
        await client.refused(status, code)
    assert len(engine.requests) == good


async def test_one_request_too_many_costs_the_others_nothing() -> None:
    engine = FakeEngine("hello", delay=0.1)
    async with place(engine) as here, here.client(ASK + HEALTH * 99) as client:
        assert (await client.answer())[0] == 200
        for _ in range(32):
            assert (await client.answer())[2] == b'{"status":"ok"}'
        await client.refused(400, "too_many_pipelined")


async def test_a_client_that_leaves_with_requests_in_the_queue() -> None:
    engine = FakeEngine("hello", delay=0.02)
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True}).encode()
    ask = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with place(engine) as here:
        async with here.client(ask * 3):
            assert await eventually(lambda: engine.running)
        assert await eventually(lambda: not engine.running)
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 1
