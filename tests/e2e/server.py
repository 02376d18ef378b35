"""A real `syringa serve` process for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import httpx

_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused, but reading certificates takes longer than a request


class Server:
    """A running server: its supervisor process, its URL and its log."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"

    def children(self, module: str = "") -> list[int]:
        """Return the ids of the supervisor's child processes, or of those that run `module`."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and module in (path / "cmdline").read_text():
                    found.append(int(path.name))
        return found

    def wait_ready(self, seconds: float = 180) -> None:
        wait_for(lambda: self.ready() == 200, seconds)

    def ready(self) -> int | None:
        """Return the status of `/ready`, or None if there is no response."""
        try:
            return httpx.get(self.url + "/ready", timeout=5, verify=_PLAIN).status_code
        except httpx.TransportError:
            return None

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=_PLAIN).raise_for_status()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def complete(self, **body: object) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=body, timeout=120)


@contextlib.contextmanager
def serve(*arguments: str, ready: bool = True, log: IO[str] | None = None, module: str = "syringa") -> Iterator[Server]:
    """Run a server with its own temporary database, unless `--database` is given. `log` receives its output.

    `module`: whose `serve` command is run.
    """
    with tempfile.TemporaryDirectory(prefix="syringa-test-") as folder, contextlib.ExitStack() as opened:
        if "--database" not in arguments:
            arguments = (*arguments, "--database", str(Path(folder) / "syringa.db"))
        if log is None:
            log = opened.enter_context(open(Path(folder) / "log", "w+"))
        with _running([module, "serve", "--port", "0", *arguments], ready, log) as server:
            yield server


@contextlib.contextmanager
def _running(arguments: Sequence[str], ready: bool, log: IO[str]) -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        server = Server(process, _port(process, Path(log.name)), Path(log.name))
        if ready:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[str], log: Path, seconds: float = 120.0) -> int:
    """Return the port that the server has bound, from its log."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = log.read_text()
        if found := re.search(r"listening host=\S+ port=(\d+)", text):
            return int(found[1])
        assert process.poll() is None, f"the server ended with status {process.returncode}: {text[-2000:]}"
        time.sleep(0.02)
    raise AssertionError(f"the server did not listen within {seconds} s: {log.read_text()[-2000:]}")


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Poll a condition until it holds. The bound is generous: it only ends a test that would hang."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true within {seconds} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not: it has exited, and its parent has not read its status yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
