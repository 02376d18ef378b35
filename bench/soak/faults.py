"""Faults: killed and stopped processes, a locked or full database, revoked keys, on a schedule from a seed.

A full disk is simulated by a limit on the size of files (RLIMIT_FSIZE) of the API processes, set from outside: writes
beyond it fail as they do on a full disk. The usage journal is smaller and stays writable. PostgreSQL has no such limit
for its clients; there its server processes are stopped instead (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from bench.soak.results import Fault, Results
from bench.soak.server import API, WORKER, SoakServer, is_stopped
from syringa.errors import SyringaError
from syringa.store.schema import metadata
from syringa.store.url import locate

RECOVERY_LIMIT = 120.0
FULL_DISK_BYTES = 192 * 1024  # above the metrics files of the API processes, which are elsewhere
REVOCATION_LIMIT = 10.0
_PAUSE = (1.0, 5.0)  # seconds between a recovery and the next fault


class Faults:
    """Injects faults one after the other, and measures the recovery from each."""

    def __init__(self, server: SoakServer, results: Results, *, probe_key: str, seed: int) -> None:
        """`probe_key`: of an organization of its own, whose requests do not queue behind those of the clients."""
        self._server, self._results, self._probe_key = server, results, probe_key
        self._rng = random.Random(f"{seed} faults")
        self.kinds: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "worker killed": self._kill_worker,
            "worker stopped": self._stop_worker,
            "API process killed": self._kill_api_process,
            "API process stopped": self._stop_api_process,
            "database locked": self._lock_database,
            "database locked, API process killed": self._kill_during_lock,
            "database full" if server.is_sqlite else "database stopped": self._fill_database,
            "key revoked": self._revoke_key,
            "server killed": self._kill_server,
        }

    async def run(self, until: float) -> None:
        """Inject every kind once, in a random order, and again until the time (`time.monotonic`)."""
        injected = 0
        while True:
            for kind in self._rng.sample(list(self.kinds), len(self.kinds)):
                if injected >= len(self.kinds) and time.monotonic() >= until:
                    return
                await asyncio.sleep(self._rng.uniform(*_PAUSE))
                await self.inject(kind)
                injected += 1

    async def inject(self, kind: str) -> Fault:
        fault = Fault(kind=kind, began=time.monotonic())
        fault.ended = fault.began
        self._results.faults.append(fault)
        try:
            await self.kinds[kind](fault)
        except (SyringaError, OSError, IndexError) as error:
            fault.note = f"could not be injected: {error}"
        if fault.recovered is None and not fault.note:
            fault.recovered = await self._wait_recovered()
        return fault

    async def _wait_recovered(self) -> float | None:
        """Wait until all processes run and new requests succeed, with and without the database."""
        deadline = time.monotonic() + RECOVERY_LIMIT
        while time.monotonic() < deadline:
            if self._server.is_whole():
                probes = (
                    self._probe("/v1/completions", {"prompt": "a", "max_tokens": 1}),
                    self._probe("/v1/completions", {"prompt": "a", "max_tokens": 1}),
                    self._probe("/v1/responses", {"input": "a", "max_output_tokens": 16}),
                )
                if all(await asyncio.gather(*probes)):
                    return time.monotonic()
            await asyncio.sleep(0.2)
        return None

    async def _probe(self, path: str, body: object) -> bool:
        reply = await self._server.ask("POST", path, body, key=self._probe_key, limit=10)
        return reply.status == 200 and not reply.failure

    # Processes

    async def _kill_worker(self, fault: Fault) -> None:
        os.kill(self._rng.choice(self._server.children(WORKER)), signal.SIGKILL)

    async def _stop_worker(self, fault: Fault) -> None:
        """Stop the worker. The server has to notice and to replace it."""
        pid = self._rng.choice(self._server.children(WORKER))
        os.kill(pid, signal.SIGSTOP)
        fault.recovered = await self._wait_replaced(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        if fault.recovered is None:
            fault.note = "the worker was not replaced"

    async def _wait_replaced(self, pid: int) -> float | None:
        deadline = time.monotonic() + RECOVERY_LIMIT
        while pid in self._server.children(WORKER):
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.1)
        return await self._wait_recovered()

    async def _kill_api_process(self, fault: Fault) -> None:
        pid = self._rng.choice(self._server.children(API))
        os.kill(pid, signal.SIGSTOP)  # so that it accepts no connection while they are listed
        for _ in range(10_000):
            if is_stopped(pid):
                break
            await asyncio.sleep(0.001)
        fault.killed_ports = self._server.client_ports(pid)
        os.kill(pid, signal.SIGKILL)
        fault.ended = time.monotonic()

    async def _stop_api_process(self, fault: Fault) -> None:
        pid = self._rng.choice(self._server.children(API))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(2, 6))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        fault.ended = time.monotonic()

    async def _kill_server(self, fault: Fault) -> None:
        fault.all_connections = True
        self._server.kill()
        fault.ended = time.monotonic()
        self._server.start()

    # Database

    async def _lock_database(self, fault: Fault) -> None:
        async with self._locked():
            await asyncio.sleep(self._rng.uniform(3, 9))
        fault.ended = time.monotonic()

    async def _kill_during_lock(self, fault: Fault) -> None:
        """Kill an API process with usage records that cannot have reached the database."""
        async with self._locked():
            await asyncio.sleep(self._rng.uniform(2, 4))
            await self._kill_api_process(fault)
            await asyncio.sleep(self._rng.uniform(1, 3))
        fault.ended = time.monotonic()

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold a lock that keeps all other connections from writing; with PostgreSQL, from reading too."""
        location = locate(self._server.database)
        if location.kind == "sqlite":
            lock = sqlite3.connect(location.target, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                await asyncio.to_thread(lock.execute, "BEGIN EXCLUSIVE")
                yield
                lock.execute("ROLLBACK")
            finally:
                lock.close()
        else:
            import psycopg

            url = "postgresql://" + location.target.partition("://")[2]
            async with await psycopg.AsyncConnection.connect(url) as connection:
                names = ", ".join(f'"{name}"' for name in metadata.tables)
                await connection.execute(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE".encode())
                yield

    async def _fill_database(self, fault: Fault) -> None:
        seconds = self._rng.uniform(4, 9)
        if self._server.is_sqlite:
            await self._limit_files(seconds)
        else:
            try:
                await self._stop_postgresql(seconds)
            except (PermissionError, ProcessLookupError) as error:
                fault.note = f"skipped: the database's processes cannot be stopped from here: {error}"
                fault.recovered = time.monotonic()
        fault.ended = time.monotonic()

    async def _limit_files(self, seconds: float) -> None:
        pids = self._server.children(API)
        before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, before[pid][1]))
        await asyncio.sleep(seconds)
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    async def _stop_postgresql(self, seconds: float) -> None:
        import psycopg

        url = "postgresql://" + locate(self._server.database).target.partition("://")[2]
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        async with await psycopg.AsyncConnection.connect(url) as connection:
            pids = [row[0] for row in await (await connection.execute(query)).fetchall()]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGCONT)

    # Keys

    async def _revoke_key(self, fault: Fault) -> None:
        """Revoke a key in use: its stream ends with an error, and new requests are refused. Both are measured."""
        key = await self._server.create_key("soak-revoked")
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        await self._wait_accepted(key.text)
        stream = asyncio.create_task(self._server.ask("POST", "/v1/completions", body, key=key.text, limit=60))
        await asyncio.sleep(1.0)
        await self._server.ask("DELETE", f"/admin/keys/{key.id}")
        fault.began = fault.ended = time.monotonic()
        refused = await self._wait_refused(key.text)
        reply = await stream
        problems = []
        if refused is None:
            problems.append(f"new requests were still accepted after {REVOCATION_LIMIT:.0f} s")
        if reply.failure or reply.error is None:  # before its first token, the error is its response
            last = reply.events[-1][:100] if reply.events else b""
            problems.append(f"its stream did not end with an error: {reply.status} {reply.failure} {last!r}")
        fault.recovered = max(refused or 0.0, reply.ended)
        fault.note = "; ".join(problems)

    async def _wait_accepted(self, key: str) -> None:
        """Wait until the key is accepted on ten connections in a row, so probably by each API process."""
        deadline = time.monotonic() + 30
        accepted = 0
        while accepted < 10 and time.monotonic() < deadline:
            reply = await self._server.ask("GET", "/v1/models", key=key, limit=10)
            accepted = accepted + 1 if reply.status == 200 else 0

    async def _wait_refused(self, key: str) -> float | None:
        deadline = time.monotonic() + REVOCATION_LIMIT
        refused, first = 0, 0.0
        while refused < 10:
            reply = await self._server.ask("GET", "/v1/models", key=key, limit=10)
            if reply.status == 401:
                refused += 1
                first = first or time.monotonic()
            else:
                refused, first = 0, 0.0
            if time.monotonic() > deadline and not refused:
                return None
        return first


async def wait_idle(server: SoakServer, limit: float = 60.0) -> dict[str, float]:
    """Wait until the engine has nothing to do, and return its gauges, or the last ones after the limit."""
    deadline = time.monotonic() + limit
    gauges: dict[str, float] = {}
    while time.monotonic() < deadline:
        gauges = await server.engine_gauges()
        if gauges and not any(gauges.values()):
            break
        await asyncio.sleep(0.5)
    return gauges
