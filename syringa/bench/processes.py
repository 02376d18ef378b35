"""Start, measure and reliably stop servers as child processes. Linux only (/proc)."""

from __future__ import annotations

import os
import platform
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
_DEAD = ("Z", "X")  # process states: zombie, dead
_EXITED = "ended with"
_EXIT_SECONDS = 0.5  # to wait for the exit of a server that has lost its connections


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a server under test, and how to describe it in reports."""

    name: str
    version: str
    precision: str
    command: Callable[[int, int], list[str]]  # (port, streams) → argv
    environment: dict[str, str | None] = {}  # added to this process's environment; None removes a variable
    slots_per_stream_count: bool = False  # restart it for each number of streams, with as many slots
    start_timeout: float = 120.0


class RunningServer(msgspec.Struct, frozen=True):
    """A server process that has answered `/health`."""

    url: str
    pid: int
    started_at: float  # time.perf_counter() just before the process was started


def cores() -> int:
    """Return the number of cores that this process may use (affinity, not all cores of the machine)."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """Return the CPU's model name, or the architecture if it is unknown."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start(server: ServerSpec, streams: int) -> Iterator[RunningServer]:
    """Start a server and wait until it is healthy. On exit its whole process tree is stopped."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **server.environment}
    with tempfile.TemporaryFile() as log:
        started_at = time.perf_counter()
        try:
            process = subprocess.Popen(
                server.command(port, streams),
                env={name: value for name, value in environment.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C does not reach it, and orphaned descendants can still be found.
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"{server.name} cannot be started: {error}") from error
        with _exit_on_sigterm():
            try:
                _wait_until_healthy(server, process, url, log)
                yield RunningServer(url, process.pid, started_at)
            except SyringaError as error:
                # A dying server closes its connections shortly before it can be waited for.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_EXIT_SECONDS)
                if process.returncode is None or _EXITED in error.message:
                    raise
                # The client only saw a lost connection; the server's last output may name the cause.
                raise StartupError(f"{error.message}; {_exit_message(server, process, log)}") from error
            finally:
                stop(process)


def stop(process: subprocess.Popen[bytes], timeout: float = 10.0) -> None:
    """Send SIGTERM to the process group, and after `timeout` SIGKILL to what is left of its tree and session."""
    tree = process_tree(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while tree := _still_alive(process, tree):
        if time.monotonic() > deadline:
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _still_alive(process: subprocess.Popen[bytes], known: set[int]) -> set[int]:
    """Return the live processes of `known` and of the current tree: a server may fork while it is being stopped."""
    process.poll()
    return {pid for pid in known | process_tree(process.pid) if is_alive(pid)}


def process_tree(root: int) -> set[int]:
    """Return `root`, its descendants, and the members of its session (found even after their parent has died)."""
    parents: dict[int, int] = {}
    tree = {root} if is_alive(root) else set()
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
    """Return the proportional set size of a process tree in bytes: shared pages are divided among processes."""
    return _memory(root, "Pss:")


def memory_rss(root: int) -> int:
    """Return the resident set size of a process tree in bytes: shared pages count once for each process."""
    return _memory(root, "Rss:")


def _memory(root: int, field: str) -> int:
    total = 0
    for pid in process_tree(root):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a process tree, including children that have ended."""
    ticks = 0
    for pid in process_tree(root):
        with suppress(OSError, ValueError):
            ticks += sum(int(field) for field in _stat(pid)[11:15])
    return ticks / _TICKS


def machine_cpu_seconds() -> float:
    """Return the CPU time of all processes of the machine, and what its hypervisor took from it (steal)."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _wait_until_healthy(server: ServerSpec, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + server.start_timeout
    host, port = url.removeprefix("http://").split(":")
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartupError(_exit_message(server, process, log))
        if _healthy(host, int(port)):
            return
        time.sleep(0.02)
    raise StartupError(f"{server.name} did not answer /health within {server.start_timeout:.0f} s: {_tail(log)}")


def _healthy(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connection.recv(64).split(b" ")[1:2] == [b"200"]
    return False


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that `finally` blocks run and the server is stopped."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not in the main thread: keep the caller's handler
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    # The command name may contain spaces and brackets; the fields after the last bracket are regular. [0] is the state.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in _DEAD
    except (OSError, IndexError):
        return False


def _exit_message(server: ServerSpec, process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    code = process.returncode
    return f"{server.name} {_EXITED} {f'signal {-code}' if code < 0 else f'code {code}'}: {_tail(log)}"


def _tail(log: IO[bytes], lines: int = 12) -> str:
    log.seek(0)
    text = log.read().decode("utf-8", "replace").strip()
    return "\n" + "\n".join(text.splitlines()[-lines:]) if text else "no output"
