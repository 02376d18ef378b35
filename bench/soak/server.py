"""The server under test: `syringa serve` with two API processes, its processes, their connections and their memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from bench.soak.wire import Address, Reply, encode_request, exchange
from syringa.bench.processes import free_port, process_tree, stop
from syringa.errors import StartupError
from syringa.service.auth.keys import create_api_key
from syringa.store import Store

API, WORKER = "syringa.http.server.process", "syringa.engine.worker.server"
API_PROCESSES = 2
BLOCK_TOKENS = 16
CACHE_TOKENS = 65_536
_LISTEN = "0A"  # a state in /proc/net/tcp
HEARTBEAT_SECONDS = 5  # after twice as long, a stopped worker is restarted
START_SECONDS = 180.0
_UNEXPECTED = re.compile(r" ERROR (syringa\.http|asyncio|uvicorn\.error)\b|^Traceback \(most recent call last\)")
_FLAGS = (
    "--workers", str(API_PROCESSES), "--kv-cache-tokens", str(CACHE_TOKENS), "--requests-per-minute", "0",
    "--heartbeat-timeout", str(HEARTBEAT_SECONDS), "--image-timeout", "3", "--drain-timeout", "10",
)  # fmt: skip


class ApiKeyPair(msgspec.Struct, frozen=True):
    id: str
    text: str


class SoakServer:
    """A server in a folder of its own. It can be killed and started again on the same port and database."""

    def __init__(self, folder: Path, database: str = "") -> None:
        """`database`: the setting; empty: a SQLite file in the folder."""
        self.folder = folder
        self.database = database or str(folder / "syringa.db")
        self.is_sqlite = "://" not in self.database
        self.address = Address("127.0.0.1", free_port())
        self.log = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.admin = ApiKeyPair("", "")

    async def create_admin_key(self) -> None:
        """Create the administrator's key. Call this before the server starts, so that it requires keys."""
        text, record = create_api_key("soak-admin", admin=True)
        async with Store(self.database) as store:
            await store.write(lambda session: session.keys.create(record))
        self.admin = ApiKeyPair(record.id, text)

    def start(self) -> None:
        """Start the server. Its output passes a pipe, which a limit on the size of files does not affect."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SYRINGA_")}
        for name in ("SYRINGA_HOME",):  # where the models are
            if name in os.environ:
                environment[name] = os.environ[name]
        command = [sys.executable, "-m", "syringa", "serve", "--port", str(self.address.port)]
        self.process = subprocess.Popen(
            [*command, "--database", self.database, *_FLAGS],
            env={**environment, "XDG_DATA_HOME": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        threading.Thread(target=_copy, args=(self.process.stdout, self.log), daemon=True).start()

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (await self.ask("GET", "/ready", limit=5)).status != 200:
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                raise StartupError(f"the server did not become ready: {self.tail()}")
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Stop the server as an operator does; what is left after 20 seconds is killed."""
        if self.process is not None:
            stop(self.process, 20.0)

    def kill(self) -> None:
        """Kill all processes at once."""
        assert self.process is not None
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        # The threads of a dying process hold the listening socket a little longer than the process is seen.
        while self._is_listening():
            time.sleep(0.001)

    def _is_listening(self) -> bool:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        return any(
            fields[3] == _LISTEN and int(fields[1].partition(":")[2], 16) == self.address.port
            for fields in map(str.split, lines)
        )

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str | None = None, limit: float = 30.0
    ) -> Reply:
        """Send one request, as the administrator by default."""
        headers = {"Authorization": f"Bearer {self.admin.text if key is None else key}"}
        data = None if body is None else msgspec.json.encode(body)
        return await exchange(self.address, encode_request(self.address, method, path, headers, data), limit=limit)

    async def create_key(self, organization: str) -> ApiKeyPair:
        reply = await self.ask("POST", "/admin/keys", {"organization": organization})
        if reply.status != 200:
            raise StartupError(f"no key could be created: {reply.status} {reply.body[:200]!r}")
        made = msgspec.json.decode(reply.body)
        return ApiKeyPair(made["id"], made["key"])

    def children(self, module: str) -> list[int]:
        """Return the processes of the server that run `module`, the oldest first."""
        if self.process is None:
            return []
        found = []
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(OSError):
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return sorted(found)

    def is_whole(self) -> bool:
        """Whether all API processes and a worker run."""
        return len(self.children(API)) == API_PROCESSES and bool(self.children(WORKER))

    def client_ports(self, pid: int) -> set[int]:
        """Return the ports of the clients whose connections a process holds."""
        inodes = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(path)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        ports = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and int(fields[1].partition(":")[2], 16) == self.address.port:
                ports.add(int(fields[2].partition(":")[2], 16))
        return ports

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each process by its role."""
        assert self.process is not None
        roles = {"supervisor": self.process.pid}
        roles |= {f"API process {number}": pid for number, pid in enumerate(self.children(API))}
        roles |= {f"worker {number}": pid for number, pid in enumerate(self.children(WORKER))}
        return {role: _resident_bytes(pid) for role, pid in roles.items()}

    async def engine_gauges(self) -> dict[str, float]:
        """Return the gauges of the engine; none while it does not respond."""
        reply = await self.ask("GET", "/metrics", limit=20)
        found = {}
        for line in reply.body.decode("utf-8", "replace").splitlines():
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                if line.startswith(f"syringa_{name}{{"):
                    found[name] = float(line.split()[-1])
        return found

    def unexpected_errors(self) -> list[str]:
        """Return the lines of the log that report an error which no code has expected."""
        text = self.log.read_text(errors="replace")
        return [line[:200] for line in text.splitlines() if _UNEXPECTED.search(line)]

    def tail(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal: it is some time after the signal was sent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("ab", buffering=0) as file:
        shutil.copyfileobj(source, file, 4096)


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
