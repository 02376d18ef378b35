"""Workers and clients over TCP with TLS: what passes, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from syringa.cluster.tls import TlsFiles, client_context
from syringa.engine.client import protocol
from syringa.engine.client.transport import listen, parse_address
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import worker_key
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import EngineUnavailable
from syringa.types import EngineDelta, EngineRequest, Image
from tests.cluster.certificates import Certificates
from tests.engine.worker.serving import HANG_SECONDS, core_of, request, serving, tls_serving, until, wait_until

Runner = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def submit(client: WorkerClient, request: EngineRequest) -> list[int]:
    """Return the tokens of a request."""
    tokens: list[int] = []

    def on_delta(delta: EngineDelta) -> bool:
        tokens.extend(delta.tokens)
        return False

    async with asyncio.timeout(HANG_SECONDS):
        await client.wait_ready()
        await client.submit(request, on_delta)
    return tokens


async def round_trip(address: str, tls: TlsFiles, requests: list[EngineRequest]) -> list[list[int]]:
    client = WorkerClient(address, tls=tls)
    client.start()
    try:
        return await asyncio.gather(*(submit(client, each) for each in requests))
    finally:
        await client.close()


def connect_raw(address: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    place = parse_address(address)
    return context.wrap_socket(
        socket.create_connection((place.host, place.port), HANG_SECONDS), server_hostname=place.host
    )


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_requests_and_tokens_pass_over_tls(certificates: Certificates, runner: Runner) -> None:
    prompts = [[index, *range(50)] for index in range(20)]
    requests = [request(prompt, str(index)) for index, prompt in enumerate(prompts)]
    with tls_serving(certificates) as (_, address):
        assert runner(round_trip(address, certificates.client, requests)) == prompts


async def test_large_message_passes_over_tls_while_others_are_served(certificates: Certificates) -> None:
    data = random.Random(1).randbytes(20 << 20)
    images = (Image(data=data, digest=b"d"),)
    with tls_serving(certificates) as (server, address):
        answers = await round_trip(
            address, certificates.client, [request([1], "large", images=images), request([2, 3], "small")]
        )
        assert answers == [[1], [2, 3]]
        received = next(each for each in core_of(server).requests if each.images)
        assert received.images == images


async def test_many_small_messages_arrive_complete_and_in_order(certificates: Certificates) -> None:
    prompt = list(range(2000))
    with tls_serving(certificates, heartbeat_seconds=0.001) as (_, address):
        assert await round_trip(address, certificates.client, [request(prompt)]) == [prompt]


def test_client_that_reads_slowly_gets_everything(certificates: Certificates) -> None:
    """Messages wait in the worker while the connection is full, and heartbeats do not come between their bytes."""
    prompt = list(range(80))
    with tls_serving(certificates, heartbeat_seconds=0.001) as (server, address):
        raw = connect_raw(address, client_context(certificates.client))
        with raw:
            for index in range(300):
                raw.sendall(protocol.frame(protocol.Submit(request(prompt, f"{index}-{'x' * 500}"))))
            wait_until(lambda: any(client.unsent for client in list(server.clients.values())))
            decoder, finished = protocol.client_decoder(), 0
            while finished < 300:
                messages = list(decoder.feed(raw.recv(1 << 16)))
                deltas = [delta for each in messages if isinstance(each, protocol.Deltas) for delta in each.deltas]
                finished += sum(delta.finish is not None for delta in deltas)


def test_reset_connection_aborts_its_requests_only(certificates: Certificates) -> None:
    with tls_serving(certificates) as (server, address):
        core = core_of(server)
        other = connect_raw(address, client_context(certificates.client))
        with core.hold():
            raw = connect_raw(address, client_context(certificates.client))
            raw.sendall(protocol.frame(protocol.Submit(request([1, 2, 3]))))
            wait_until(core.stepping.is_set)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()  # sends a reset
        wait_until(lambda: core.disconnected)
        assert len(server.clients) == 1
        other.sendall(protocol.frame(protocol.GetStats()))
        decoder = protocol.client_decoder()
        messages: list[protocol.FromWorker] = []
        while not any(isinstance(each, protocol.StatsReply) for each in messages):
            messages += decoder.feed(other.recv(1000))
        other.close()


def test_malformed_message_disconnects_its_client_only(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with tls_serving(certificates) as (_, address):
        with connect_raw(address, client_context(certificates.client)) as raw:
            raw.sendall(struct.pack("<I", 3) + b"abc")
            while raw.recv(1000):
                pass
        assert asyncio.run(round_trip(address, certificates.client, [request([5])])) == [[5]]
    assert "its message is malformed" in caplog.text


def test_heartbeats_are_sent_during_a_long_step(tmp_path: Path) -> None:
    listener = listen(f"unix:{tmp_path}/a.sock")
    with serving(listener) as server, socket.socket(socket.AF_UNIX) as raw:
        core = core_of(server)
        raw.settimeout(HANG_SECONDS)
        raw.connect(f"{tmp_path}/a.sock")
        decoder = protocol.client_decoder()
        messages: list[protocol.FromWorker] = []
        with core.hold():
            raw.sendall(protocol.frame(protocol.Submit(request([1, 2]))))
            wait_until(core.stepping.is_set)
            messages += decoder.feed(raw.recv(1000))
            assert isinstance(messages[0], protocol.Ready)
            seen = len(messages)
            while len(messages) < seen + 3:
                messages += decoder.feed(raw.recv(1000))
        assert all(isinstance(each, protocol.Heartbeat) for each in messages[1:])


REFUSED_CLIENTS = {
    "none": ("it has no certificate", "CERTIFICATE_REQUIRED"),
    "foreign": ("not from the authority of this cluster", "UNKNOWN_CA"),
    "expired": ("has expired", "CERTIFICATE_EXPIRED"),
    "wrong role": ("has the wrong role", "UNSUPPORTED_CERTIFICATE"),
    "node": ("has the wrong role", "EOF"),
}


def receive_after_submit(raw: ssl.SSLSocket) -> bytes:
    raw.sendall(protocol.frame(protocol.Submit(request([1]))))
    if not (received := raw.recv(1000)):
        raise ConnectionError("EOF")
    return received


@pytest.mark.parametrize("kind", REFUSED_CLIENTS)
def test_worker_refuses_clients_without_a_valid_certificate(
    certificates: Certificates, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that such a client sends is handled, and nothing is sent to it."""
    caplog.set_level(logging.WARNING, "syringa")
    logged, alert = REFUSED_CLIENTS[kind]
    if kind == "none":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certificates.ca)
    else:
        context = client_context(certificates.refused(kind, "client"))
    with tls_serving(certificates) as (server, address):
        raw = connect_raw(address, context)  # in TLS 1.3, the client is done before the server has verified it
        with raw, pytest.raises(OSError, match=f"{alert}|EOF|reset|[Bb]roken"):
            receive_after_submit(raw)
        wait_until(lambda: logged in caplog.text)
        assert "connection refused: peer=127.0.0.1:" in caplog.text
        assert asyncio.run(round_trip(address, certificates.client, [request([7])])) == [[7]]
        assert [each.prompt for each in core_of(server).requests] == [[7]]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("foreign", "it says that our certificate is not from the authority of its cluster"),
        ("expired", "it says that our certificate has expired"),
        ("wrong role", "it says that our certificate has the wrong role"),
    ],
)
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_client_reports_why_the_worker_refused_it(
    certificates: Certificates, kind: str, reason: str, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def connect(address: str) -> None:
        client = WorkerClient(address, tls=certificates.refused(kind, "client"), on_change=lambda: None)
        client.start()
        with pytest.raises(EngineUnavailable, match=reason):
            await client.wait_ready()
        assert client.lost
        assert client.error == reason
        await client.close()

    with tls_serving(certificates) as (_, address):
        runner(connect(address))
    assert f"no connection to a model worker: address={address} reason={reason!r}" in caplog.text


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("foreign", "its certificate is not from the authority of this cluster"),
        ("expired", "its certificate has expired"),
        ("wrong role", "its certificate has the wrong role"),
        ("node", "its certificate has the wrong role"),
        ("other host", "its certificate is for another host"),
    ],
)
async def test_client_refuses_workers_without_a_valid_certificate(
    certificates: Certificates, kind: str, reason: str
) -> None:
    listener = listen("tcp:127.0.0.1:0", certificates.refused(kind, "server"))
    with serving(listener) as server:
        client = WorkerClient(str(listener.address), tls=certificates.client, on_change=lambda: None)
        client.start()
        with pytest.raises(EngineUnavailable, match=reason):
            await client.wait_ready()
        await client.close()
        assert not server.clients


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", protocol.frame(protocol.GetStats()), bytes(100)])
def test_worker_refuses_connections_without_tls(
    certificates: Certificates, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "syringa")
    with tls_serving(certificates) as (server, address):
        place = parse_address(address)
        with socket.create_connection((place.host, place.port), HANG_SECONDS) as plain:
            plain.sendall(data)
            received = b""
            try:
                while piece := plain.recv(1000):
                    received += piece
            except ConnectionError:
                pass
        assert len(received) <= 7  # at most a TLS alert
        wait_until(lambda: "connection refused" in caplog.text)
        assert not server.clients


async def test_client_reports_an_unreachable_worker(certificates: Certificates) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp:127.0.0.1:{unused.getsockname()[1]}"
        changes = []
        client = WorkerClient(address, tls=certificates.client, on_change=lambda: changes.append(client.lost))
        client.start()
        await until(lambda: client.lost)
        assert changes == [True]
        assert "refused" in client.error
        await client.close()


async def test_client_needs_certificates_for_tcp() -> None:
    client = WorkerClient("tcp:127.0.0.1:1", on_change=lambda: None)
    client.start()
    with pytest.raises(EngineUnavailable, match="needs the certificates of a cluster"):
        await client.wait_ready()
    await client.close()


async def connect_when_it_listens(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return await asyncio.open_unix_connection(path)
            await asyncio.sleep(0.01)


async def test_worker_process_listens_for_its_supervisor_and_for_other_machines(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The supervisor learns from `Ready` where other machines connect."""
    options = WorkerOptions(
        socket=str(tmp_path / "w.sock"), model="fine", listen="tcp:127.0.0.1:0", tls=certificates.server
    )
    process = managed_process.spawn("tests.engine.processes.stub_worker", options)
    try:
        reader, writer = await connect_when_it_listens(options.socket)
        ready, *_ = protocol.client_decoder().feed(await reader.read(1000))  # heartbeats may follow
        writer.close()
        assert isinstance(ready, protocol.Ready)
        assert ready.address.startswith("tcp:127.0.0.1:")
        assert await round_trip(ready.address, certificates.client, [request([4, 2])]) == [[4, 2]]
    finally:
        managed_process.terminate(process, HANG_SECONDS)


def test_models_are_the_same_wherever_their_workers_listen(certificates: Certificates) -> None:
    options = WorkerOptions(socket="a", model="m")
    remote = WorkerOptions(socket="b", model="m", listen="tcp:127.0.0.1:0", tls=certificates.server)
    assert worker_key(options) == worker_key(remote)


def test_worker_process_that_cannot_listen_says_why(tmp_path: Path) -> None:
    options = WorkerOptions(socket=str(tmp_path / "w.sock"), model="fine", listen="tcp:127.0.0.1:0")
    process = managed_process.spawn("syringa.engine.worker.server", options)
    assert process.wait(HANG_SECONDS) == managed_process.EXIT_CANNOT_START
    managed_process.terminate(process, 0)
    assert "only with the certificates of a cluster" in Path(options.reason_file).read_text()
