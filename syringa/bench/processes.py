"""Servers as child processes: start, wait until they answer, measure, and end them for sure. Linux only, by /proc."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from syringa.errors import StartupError, SyringaError

_TICKS = os.sysconf("SC_CLK_TCK")
_DEAD = ("Z", "X")  # ended, and waiting for a parent to notice
_ENDED = "ended with"


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one server under test, and what to say of it."""

    name: str
    version: str
    precision: str
    command: Callable[[int, int], list[str]]  # (port, streams) → argv
    environment: dict[str, str | None] = {}  # on top of our own; None: without that variable
    slots_per_stream_count: bool = False  # start it anew for each number of streams, with as many slots
    start_timeout: float = 120.0


class Running(msgspec.Struct, frozen=True):
    """A server that has answered `/health`."""

    url: str
    pid: int
    spawned: float  # time.perf_counter() just before it was started


def cores() -> int:
    """Cores that this process may use, which a container's or taskset's limit makes fewer than the machine's."""
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start(server: Server, streams: int) -> Iterator[Running]:
    """The server, up and healthy; it and everything it started are gone when the block is left."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **server.environment}
    with tempfile.TemporaryFile() as log:
        spawned = time.perf_counter()
        try:
            process = subprocess.Popen(
                server.command(port, streams),
                env={name: value for name, value in environment.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches us alone, and its members can be found even when orphaned.
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"{server.name} cannot be started: {error}") from error
        with _ended_on_sigterm():
            try:
                _wait_until_healthy(server, process, url, log)
                yield Running(url, process.pid, spawned)
            except SyringaError as error:
                # Its connections close a moment before it counts as ended.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                if process.returncode is None or _ENDED in error.message:
                    raise
                # What its client saw, a lost connection, is not the reason; what the server said last may be.
                raise StartupError(f"{error.message}; {_last_words(server, process, log)}") from error
            finally:
                stop(process)


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """Asks the process group to end, then kills whatever is left of its tree and of its session."""
    tree = process_tree(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while tree := _still_alive(process, tree):
        if time.monotonic() > deadline:
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _still_alive(process: subprocess.Popen[bytes], known: set[int]) -> set[int]:
    """What is left of `known`, and what has been started since: a server may fork while it is being ended."""
    process.poll()
    return {pid for pid in known | process_tree(process.pid) if _alive(pid)}


def process_tree(root: int) -> set[int]:
    """`root`, its descendants, and the members of its session, which stay findable after their parent has died."""
    parents: dict[int, int] = {}
    tree = {root} if _alive(root) else set()
    for pid in _pids():
        with suppress(OSError, ValueError):
            state, parent, _, session, *_ = _stat(pid)
            if state in _DEAD:
                continue
            parents[pid] = int(parent)
            if int(session) == root:
                tree.add(pid)
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree |= children
        grown = bool(children)
    return tree


def memory_pss(root: int) -> int:
    """Bytes of memory of a process tree; a page that several processes share is divided among them."""
    total = 0
    for pid in process_tree(root):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(root: int) -> float:
    """CPU time that a process tree has used, with that of its children that have ended."""
    ticks = 0
    for pid in process_tree(root):
        with suppress(OSError, ValueError):
            ticks += sum(int(field) for field in _stat(pid)[11:15])
    return ticks / _TICKS


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + server.start_timeout
    host, port = url.removeprefix("http://").split(":")
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartupError(_last_words(server, process, log))
        if _healthy(host, int(port)):
            return
        time.sleep(0.02)
    raise StartupError(f"{server.name} did not answer /health within {server.start_timeout:.0f} s: {_tail(log)}")


def _healthy(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
        return connection.recv(64).split(b" ")[1:2] == [b"200"]
    return False


@contextmanager
def _ended_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exit that runs `finally` blocks: without it the server would outlive us."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not in the main thread: the caller's handlers decide
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    # The command name may hold spaces and brackets: what follows the last bracket is regular. [0] is the state.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in _DEAD
    except (OSError, IndexError):
        return False


def _last_words(server: Server, process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    code = process.returncode
    return f"{server.name} {_ENDED} {f'signal {-code}' if code < 0 else f'code {code}'}: {_tail(log)}"


def _tail(log: IO[bytes], lines: int = 12) -> str:
    log.seek(0)
    text = log.read().decode("utf-8", "replace").strip()
    return "\n" + "\n".join(text.splitlines()[-lines:]) if text else "it said nothing"
