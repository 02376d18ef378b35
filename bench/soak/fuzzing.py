"""`--fuzz N`: the fuzzer alone, without faults, many requests in a short time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import time

import msgspec
import websockets
from websockets.asyncio.client import connect

from bench.soak.fuzz import Fuzzer
from bench.soak.report import Report, Row, zero
from bench.soak.results import LOAD_CODES, Results
from bench.soak.server import SoakServer
from bench.soak.wire import encode_request, error_details, exchange

CONNECTIONS = 16
HANG_SECONDS = 10.0
LIMIT_SECONDS = 60.0
WEBSOCKET_SHARE = 0.02
# A client that sets a deadline of 5 seconds is told when it has passed.
_EXPECTED = LOAD_CODES | {"timeout"}


class FuzzRun:
    """Sends requests over several connections at once, and counts what comes back."""

    def __init__(self, server: SoakServer, fuzzer: Fuzzer, key: str, count: int, seed: int) -> None:
        self._server, self._fuzzer, self._key, self._count, self._seed = server, fuzzer, key, count, seed
        self._numbers = iter(range(count))
        self._results = Results()
        self._slow: list[str] = []
        self._statuses: collections.Counter[str] = collections.Counter()
        self._messages = 0

    async def run(self, about: str) -> Report:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._worker())
        return self._report(about, time.monotonic() - began)

    async def _worker(self) -> None:
        for number in self._numbers:
            rng = random.Random(f"{self._seed} fuzz {number}")
            began = time.monotonic()
            where = await (self._websocket(rng) if rng.random() < WEBSOCKET_SHARE else self._http(rng))
            if time.monotonic() - began > HANG_SECONDS:
                self._slow.append(f"number {number}: {where}")

    async def _http(self, rng: random.Random) -> str:
        request = self._fuzzer.draw(rng)
        key = self._server.admin.text if request.path.startswith("/admin") else self._key
        headers = {"Authorization": f"Bearer {key}", **request.headers}
        raw = encode_request(self._server.address, request.method, request.path, headers, request.body)
        reply = await exchange(self._server.address, raw, limit=LIMIT_SECONDS)
        self._statuses[f"{reply.status // 100}xx" if reply.status else "no response"] += 1
        self._results.add(reply, request.where)
        return request.where

    async def _websocket(self, rng: random.Random) -> str:
        """Send a few messages, and read until there is an answer to each or a second has passed without one."""
        address = self._server.address
        began = time.monotonic()
        try:
            async with connect(
                f"ws://{address.host}:{address.port}/v1/responses",
                additional_headers={"Authorization": f"Bearer {self._key}"},
                proxy=None,
                close_timeout=2,
                max_size=None,
            ) as connection:
                for _ in range(rng.randint(1, 4)):
                    self._messages += 1
                    await connection.send(self._fuzzer.message(rng))
                with contextlib.suppress(TimeoutError):
                    while True:
                        async with asyncio.timeout(1):
                            text = await connection.recv()
                        self._note_event(text if isinstance(text, bytes) else text.encode(), began)
        except (OSError, websockets.WebSocketException, EOFError) as error:
            self._results.unstructured.append(f"WebSocket: {error!r}")
        return "WEBSOCKET /v1/responses"

    def _note_event(self, data: bytes, began: float) -> None:
        error = error_details(data)
        if error is None:
            return
        event = msgspec.json.decode(data)
        status = event.get("status", 200) if event["type"] == "error" else 500
        if isinstance(status, int) and status >= 500:
            self._results.add_event_failure(began, "WEBSOCKET /v1/responses", error.code, error.message, status)

    def _report(self, about: str, seconds: float) -> Report:
        results = self._results
        ours = [each for each in results.failures if each.code not in _EXPECTED]
        expected = collections.Counter(each.code for each in results.failures if each.code in _EXPECTED)
        lost = [*results.lost, *results.refused]
        rows = [
            Row("requests", f"{self._count:,} in {seconds:.0f} s, seed {self._seed}"),
            Row("by status", _listed(self._statuses)),
            Row("messages over WebSockets", f"{self._messages:,}"),
            Row("deadline of the client passed, or load shed", _listed(expected)),
            zero("5xx that are ours", len(ours), _first([f"{each.where} {each.code}" for each in ours])),
            zero(f"no end within {HANG_SECONDS:.0f} s", len(self._slow), _first(self._slow)),
            zero("connections without a complete response", len(lost), _first([each.where for each in lost])),
            zero("errors without the error envelope", len(results.unstructured), _first(results.unstructured)),
            zero(
                "streams without a terminal event",
                len(results.without_terminal),
                _first([each.where for each in results.without_terminal]),
            ),
            Row(
                "slowest answer", f"{results.slowest[0][0]:.1f} s ({results.slowest[0][1]})" if results.slowest else ""
            ),
        ]
        details = {"ours": ours[:50], "slow": self._slow[:50], "unstructured": results.unstructured[:50]}
        return Report("fuzz", about, rows, details)


def _first(found: list[str]) -> str:
    return f": {'; '.join(found[:3])}" if found else ""


def _listed(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in sorted(counts.items())) or "0"
