"""The parts of the soak without a server, and in the slow tier the soak itself."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.soak import __main__ as soak
from bench.soak import workload
from bench.soak.fuzz import Fuzzer
from bench.soak.report import Report, Row, soak_report, write_page, zero
from bench.soak.results import Fault, MeteredRequest, Results
from bench.soak.usage_check import UsageCheck, compare
from bench.soak.wire import Address, Reply, encode_request, error_details, exchange, is_terminal
from syringa.errors import StartupError
from syringa.http.endpoints import ENDPOINTS, openapi_document
from syringa.store.records import UsageRecord

# Workload


def test_every_endpoint_has_a_builder() -> None:
    workload.check_complete()


def test_missing_builder_is_an_error() -> None:
    new = dataclasses.replace(ENDPOINTS[0], path="/v1/new")
    with pytest.raises(StartupError, match="/v1/new"):
        workload.check_complete((*ENDPOINTS, new))


def test_requests_of_all_endpoints_have_filled_paths() -> None:
    state = workload.OrganizationState()
    draw = workload.Draw(random.Random(1), state, "model", 0)
    for endpoint in ENDPOINTS:
        path, body = workload.BUILDERS[endpoint.method, endpoint.path][1](draw)
        assert "{" not in path
        json.dumps(body)


# Fuzzer


@pytest.fixture(scope="module")
def fuzzer() -> Fuzzer:
    return Fuzzer(openapi_document(secured=True), admin=True)


def test_fuzzer_is_determined_by_its_seed(fuzzer: Fuzzer) -> None:
    first = [fuzzer.draw(random.Random(number)) for number in range(50)]
    assert first == [fuzzer.draw(random.Random(number)) for number in range(50)]
    assert fuzzer.message(random.Random(1)) == fuzzer.message(random.Random(1))


def test_fuzzer_reaches_every_operation(fuzzer: Fuzzer) -> None:
    rng = random.Random(1)
    drawn = {fuzzer.draw(rng).where for _ in range(3000)}
    assert drawn == {f"{method} {path}" for method, path, _ in fuzzer.operations}


def test_fuzzer_sends_valid_and_invalid_json(fuzzer: Fuzzer) -> None:
    rng = random.Random(1)
    valid = collections.Counter[bool]()
    for _ in range(1000):
        body = fuzzer.draw(rng).body
        if body is not None:
            with contextlib.suppress(UnicodeDecodeError):
                try:
                    json.loads(body)
                    valid[True] += 1
                except ValueError:
                    valid[False] += 1
    assert valid[True] > 20 * valid[False] > 0


def test_fuzzer_keeps_from_admin_endpoints_by_default() -> None:
    fuzzer = Fuzzer(openapi_document(secured=True))
    assert not any(path.startswith("/admin") for _, path, _ in fuzzer.operations)


# Wire


@contextlib.asynccontextmanager
async def serving(response: bytes, *, hold: bool = False) -> AsyncIterator[Address]:
    """A server that sends one response, and then closes the connection or holds it."""
    released = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        if hold:
            await released.wait()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        released.set()
        server.close()


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def ask(address: Address, **options: float) -> Reply:
    return await exchange(address, encode_request(address, "GET", "/", {}, None), **options)


async def test_exchange_reads_complete_body() -> None:
    async with serving(b"HTTP/1.1 404 No\r\nContent-Length: 25\r\n\r\n" + b'{"error":{"message":"a"}}') as address:
        reply = await ask(address)
    assert (reply.status, reply.failure, reply.error and reply.error.message) == (404, "", "a")


async def test_exchange_reads_stream_to_its_terminal_event() -> None:
    data = chunk(b'data: {"choices":[]}\n\n') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    async with serving(STREAM + data) as address:
        reply = await ask(address)
    assert (reply.status, reply.failure, reply.has_terminal_event) == (200, "", True)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", STREAM + chunk(b"data: {}\n\n")])
async def test_exchange_notices_lost_connection(sent: bytes) -> None:
    async with serving(sent) as address:
        assert (await ask(address)).failure == "lost"


async def test_exchange_leaves_and_notices_hanging_server() -> None:
    async with serving(b"", hold=True) as address:
        assert (await ask(address, leave_after=0.01)).failure == "left"
        assert (await ask(address, limit=0.01)).failure == "hang"


@pytest.mark.parametrize(
    ("event", "terminal"),
    [
        ("[DONE]", True),
        ('{"choices": []}', False),
        ('{"error": {"message": "a", "code": "b"}}', True),
        ('{"type": "response.created", "response": {"error": null}}', False),
        ('{"type": "response.completed", "response": {}}', True),
        ('{"type": "error", "message": "a", "code": "b"}', True),
        ('{"type": "error", "status": 500, "error": {"message": "a", "code": "b", "param": null}}', True),
        ("{", False),
    ],
)
def test_terminal_events(event: str, terminal: bool) -> None:
    assert is_terminal(event.encode()) is terminal


@pytest.mark.parametrize(
    "event",
    [
        '{"error": {"message": "a", "code": "b"}}',
        '{"type": "error", "status": 503, "error": {"message": "a", "code": "b"}}',
        '{"type": "error", "message": "a", "code": "b"}',
        '{"type": "response.failed", "response": {"error": {"message": "a", "code": "b"}}}',
    ],
)
def test_error_details_of_all_formats(event: str) -> None:
    details = error_details(event.encode())
    assert details is not None
    assert (details.message, details.code) == ("a", "b")


# Results


def failed_reply(code: str, status: int = 503, *, at: float = 10.0, message: str = "m") -> Reply:
    body = json.dumps({"error": {"message": message, "code": code}}).encode()
    return Reply(began=at, ended=at + 1, status=status, body=body, local_port=7)


@pytest.mark.parametrize(
    ("code", "status", "at", "cause"),
    [
        ("engine_unavailable", 503, 12.0, "fault"),
        ("engine_unavailable", 503, 5.0, "ours"),
        ("engine_unavailable", 503, 400.0, "ours"),
        ("engine_overloaded", 503, 400.0, "load"),
        ("internal_error", 500, 12.0, "ours"),
    ],
)
def test_server_error_is_explained_by_fault(code: str, status: int, at: float, cause: str) -> None:
    results = Results()
    results.faults.append(Fault(kind="worker killed", began=10.0, ended=10.0, recovered=20.0))
    results.add(failed_reply(code, status, at=at), "POST /")
    [failure] = results.failures
    assert results.cause(failure) == cause


def test_lost_connection_of_killed_process_is_counted_apart() -> None:
    results = Results()
    results.faults.append(Fault(kind="API process killed", began=10.0, ended=10.0, recovered=12.0, killed_ports={7}))
    for port in (7, 8):
        results.add(Reply(began=9.0, ended=10.1, failure="lost", local_port=port), "POST /")
    results.add(Reply(began=11.0, ended=11.1, failure="lost", local_port=7), "POST /")  # a new connection
    assert [results.is_killed(each) for each in results.lost] == [True, False, False]


def test_stream_without_terminal_event_fails_report() -> None:
    results = Results()
    headers = {"content-type": "text/event-stream"}
    results.add(Reply(began=1.0, ended=2.0, status=200, headers=headers, events=[b'{"choices":[]}']), "POST /")
    assert [row.name for row in report_of(results).rows if row.failed] == ["streams without a terminal event"]


def report_of(results: Results) -> Report:
    usage = UsageCheck(ended=0, rows=0, lost=0, duplicated=0)
    return soak_report("sqlite", "about", results, usage, leaked_blocks=0, memory=({}, {}), unexpected=[])


def test_report_fails_for_fault_without_recovery() -> None:
    results = Results()
    results.faults.append(Fault(kind="worker stopped", began=1.0, ended=1.0))
    assert [row.name for row in report_of(results).rows if row.failed] == ["worker stopped"]


def test_report_replaces_its_table_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sqlite -->\nold\n<!-- end of sqlite -->\nafter\n")
    report = Report("sqlite", "about", [Row("requests", "5"), zero("lost", 0)])
    write_page(report, page)
    write_page(report, page)
    assert page.read_text() == (
        "before\n<!-- sqlite -->\nabout\n\n| | |\n| --- | --- |\n"
        "| requests | 5 |\n| lost | 0 |\n<!-- end of sqlite -->\nafter\n"
    )
    assert report.passed
    assert zero("lost", 1).failed


# Usage


def row(request_id: str, *, status: int = 200, requests: int = 1, organization: str = "a") -> UsageRecord:
    return UsageRecord(
        at=0.0,
        organization=organization,
        model="m",
        endpoint="/",
        request_id=request_id,
        outcome="refused" if 400 <= status < 500 else "ok",
        status=status,
        requests=requests,
    )


def ended(request_id: str, status: int = 200, organization: str = "a") -> MeteredRequest:
    return MeteredRequest(request_id, organization, status, 400 <= status < 500)


def checked(requests: list[MeteredRequest], rows: list[UsageRecord], unknown: int = 0) -> tuple[int, int]:
    found = compare(requests, collections.Counter({"a": unknown}), rows)
    return found.lost, found.duplicated


def test_usage_check_counts_lost_and_duplicated_rows() -> None:
    assert checked([ended("soak-1"), ended("soak-2")], [row("soak-1"), row("soak-2"), row("soak-3")]) == (0, 0)
    assert checked([ended("soak-1"), ended("soak-2")], [row("soak-1")]) == (1, 0)
    assert checked([ended("soak-1")], [row("soak-1"), row("soak-1")]) == (0, 1)


def test_usage_check_compares_merged_refusals_by_number() -> None:
    refused = [ended(f"soak-{number}", 429) for number in range(5)]
    assert checked(refused, [row("soak-0", status=429, requests=4), row("soak-4", status=429)]) == (0, 0)
    assert checked(refused, [row("soak-0", status=429, requests=4)]) == (1, 0)
    assert checked(refused, [row("soak-0", status=429, requests=7)]) == (0, 2)
    assert checked(refused, [row("soak-0", status=429, requests=7)], unknown=2) == (0, 0)


# The soak


# Lines that depend on when a process was killed or on the speed of the machine are for the reader of the table.
INVARIANTS = {
    "5xx that are ours",
    "errors without the error envelope",
    "their usage rows lost",
    "their usage rows duplicated",
    "KV blocks leaked",
    "unexpected errors in the server's log",
}


def failed_invariants(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Row]:
    """Run the soak and return the lines that must always be zero and are not."""
    reports: list[Report] = []
    monkeypatch.setattr(soak, "show", lambda report, console: reports.append(report))
    soak.main(list(arguments))
    (report,) = reports
    assert {row.name for row in report.rows} & INVARIANTS
    return [row for row in report.rows if row.failed and row.name in INVARIANTS]


@pytest.mark.slow
@pytest.mark.model
def test_quick_soak_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed_invariants(monkeypatch, "--quick") == []


@pytest.mark.slow
@pytest.mark.model
def test_fuzzer_finds_no_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed_invariants(monkeypatch, "--fuzz", "2000", "--seed", "2") == []
