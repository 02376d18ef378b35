"""A server with API keys, two API processes and its own database, observed from outside."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from syringa.store import Store, UsageRecord
from tests.e2e.server import Server, serve, wait_for
from tests.store.helpers import read

PROMPT = "the purple giraffe of Samarkand"  # must not appear in a log
WORKER, API = "syringa.engine.worker.server", "syringa.http.server.process"


class Key(msgspec.Struct, frozen=True):
    id: str
    text: str

    @property
    def header(self) -> str:
        return f"Bearer {self.text}"


class Service:
    """A running server with its processes, metrics and log."""

    def __init__(self, server: Server, database: str, log: Path) -> None:
        self.server, self.url, self.database = server, server.url, database
        self._log = log
        self.port = int(server.url.rpartition(":")[2])

    def processes(self) -> dict[int, str]:
        """Return the API processes and model workers, each with the module that it runs."""
        return {pid: module for module in (API, WORKER) for pid in self.server.children(module)}

    def memory(self) -> dict[int, int]:
        """Return the resident bytes of each process."""
        return {pid: _status(pid, "VmRSS:") * 1024 for pid in self.processes()}

    def files(self) -> dict[int, int]:
        """Return the number of open file descriptors of each process."""
        return {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.processes()}

    def owner(self, port: int) -> int:
        """Return the API process that holds the connection of the client port `port`."""
        inode = _inode(self.port, port)
        for pid in self.server.children(API):
            with contextlib.suppress(OSError):  # the process may have ended
                for each in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if str(each.readlink()) == f"socket:[{inode}]":
                            return pid
        raise LookupError(f"no process has the connection of port {port}")

    def connections(self) -> dict[int, http.client.HTTPConnection]:
        """Return a connection to each API process. The kernel distributes new ones, so it takes some attempts."""
        found: dict[int, http.client.HTTPConnection] = {}
        end = time.monotonic() + 120
        while found.keys() != set(self.server.children(API)):
            assert time.monotonic() < end, "an API process accepts no connection"
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("GET", "/health")
            connection.getresponse().read()
            with contextlib.suppress(LookupError):  # the system's table may skip a line while others are removed
                found.setdefault(self.owner(connection.sock.getsockname()[1]), connection)
        return found

    def wait_known(self, *keys: Key) -> None:
        """Wait until every API process accepts the keys."""
        for connection in self.connections().values():
            for key in keys:
                wait_for(lambda connection=connection, key=key: status(connection, key) == 200)

    def metric(self, name: str) -> float:
        """Return a metric of the engine, the same in all API processes, or NaN if the engine did not answer in time."""
        found = [each for each in self.metrics().splitlines() if each.startswith(f"syringa_{name}{{")]
        return float(found[0].split()[-1]) if found else math.nan

    def metrics(self) -> str:
        return httpx.get(self.url + "/metrics", timeout=120).text

    def wait_idle(self) -> None:
        """Wait until the engine has no running or waiting request and all blocks are free."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: [self.metric(name) for name in names] == [0, 0, 0])

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Tenants:
    """A server with the keys of two organizations and of an administrator."""

    def __init__(self, service: Service, admin: Key) -> None:
        self.service, self.admin = service, admin
        self.url, self.database = service.url, service.database
        self.ours, self.theirs = self._make_key("ours"), self._make_key("theirs")
        service.wait_known(self.ours, self.theirs)

    def _make_key(self, organization: str) -> Key:
        self.ask("PUT", f"/admin/organizations/{organization}", self.admin, json={"requests_per_minute": 0})
        made = self.ask("POST", "/admin/keys", self.admin, json={"organization": organization}).json()
        return Key(made["id"], made["key"])

    def ask(self, method: str, path: str, key: Key | None = None, **more: Any) -> httpx.Response:
        headers = {"authorization": (key or self.ours).header, **more.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=120, **more)

    def complete(self, **body: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **body})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.service.port), timeout=60)

    def raw(self, *lines: bytes, body: bytes = b"") -> bytes:
        """Return the response to a request of raw lines, on a new connection."""
        with self.connect() as connection:
            connection.sendall(b"\r\n".join([*lines, b"connection: close", b"", b""]) + body)
            parts = []
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    parts.append(part)
            return b"".join(parts)


@contextlib.contextmanager
def start(database: str, folder: Path, *arguments: str) -> Iterator[Service]:
    log = folder / "log"
    given = ("--workers", "2", "--database", database, "--public-metrics", *arguments)
    with log.open("w") as out, serve(*given, log=out) as server:
        yield Service(server, database, log)


def status(connection: http.client.HTTPConnection, key: Key) -> int:
    """Return the status of a request with a key on a connection."""
    connection.request("GET", "/v1/models", headers={"authorization": key.header})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def command(database: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `syringa ... --database database`."""
    line = [sys.executable, "-m", "syringa", *arguments, "--database", database]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def create_key(database: str, organization: str, *options: str) -> Key:
    done = command(database, "keys", "create", organization, *options)
    id = re.search(r"Created (\S+) for ", done.stderr)
    assert id is not None, done.stderr
    return Key(id[1], done.stdout.strip())


def usage_records(database: str) -> list[UsageRecord]:
    """Return all usage records, newest first."""

    async def read_pages() -> list[UsageRecord]:
        rows: list[UsageRecord] = []
        async with Store(database) as store:
            while page := await read(store).usage.records(after=rows[-1].id if rows else None, limit=1000):
                rows += page
        return rows

    return asyncio.run(read_pages())


def _status(pid: int, name: str) -> int:
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith(name)]
    return int(line.split()[1])


def _inode(local: int, remote: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [int(each.rpartition(":")[2], 16) for each in fields[1:3]] == [local, remote]:
            return fields[9]
    raise LookupError(f"no connection from port {remote}")
