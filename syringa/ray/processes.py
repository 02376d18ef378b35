"""The processes of Ray on this machine: `ray start` for a head or for a node, as a child of this process.

Ray's ports run code for everything that connects. All of it is therefore behind a token and mutual TLS with
certificates of an authority that only Ray's processes have; there is no dashboard, no job server, no Ray Client and no
usage report.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from syringa.cluster.folder import ClusterFolder
from syringa.engine.processes import managed_process
from syringa.errors import ConfigError, StartupError

RECONNECT_SECONDS = 600  # for which nodes wait for a head that is gone, while their replicas serve
START_SECONDS = 120.0
STOP_SECONDS = 15.0
OBJECT_STORE_BYTES = 80_000_000  # of Ray: close to the least that it accepts; nothing is stored there

CLUSTER_DIR_VARIABLE = "_SYRINGA_CLUSTER_DIR"  # also marks our processes, for the load of others
FOLDER_VARIABLE = "_SYRINGA_NODE_FOLDER"
GPUS_VARIABLE = "_SYRINGA_NODE_GPUS"  # CUDA_VISIBLE_DEVICES of the node, which Ray changes for actors
GCS, RAYLET = "gcs_server", "raylet"  # programs of Ray: of a head, and of a node
WATCH_SECONDS = 1.0  # between two attempts to find such a program

MEMBER_LABEL = "syringa-member"  # by which a node finds itself in Ray's table
HEAD_LABEL = "syringa-head"

_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"


class RayProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a process that runs `ray start`: the arguments of that command."""

    arguments: list[str]


def environment(folder: ClusterFolder, *, redis: str = "") -> dict[str, str]:
    """Return the variables for every process of Ray: nodes, drivers and clients."""
    files = folder.ray_files()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.ray_token),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": files.certificate,
        "RAY_TLS_SERVER_KEY": files.key,
        "RAY_TLS_CA_CERT": files.ca,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "false",  # agents would show them to everything that connects
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nodes are drained before their processes are stopped
        "RAY_health_check_period_ms": "1000",  # of nodes, by the head; 5 failures in a row mean that one is lost
        "RAY_memory_monitor_refresh_ms": "0",  # would kill replicas when the owner's processes fill the memory
        "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
        _RECONNECT_VARIABLE: str(reconnect_seconds()),
        CLUSTER_DIR_VARIABLE: str(folder.path),
    }
    if (gpus := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        variables[GPUS_VARIABLE] = gpus
    if redis:
        variables["RAY_REDIS_ADDRESS"] = redis
        # Several clusters may share a Redis, also with folders of the same name.
        authority = hashlib.sha256(Path(files.ca).read_bytes()).hexdigest()
        variables["RAY_external_storage_namespace"] = f"syringa-{authority[:16]}"
    return variables


def reconnect_seconds() -> int:
    """Return for how long nodes wait for a head that is gone. Raises `ConfigError`."""
    value = os.environ.get(_RECONNECT_VARIABLE, str(RECONNECT_SECONDS))
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{_RECONNECT_VARIABLE}={value!r}: expected a number of seconds")
    return int(value)


def head_arguments(address: str, port: int, *, redis_password: str = "") -> list[str]:
    """Return the arguments of `ray start` for a head. It offers no resources: replicas run on nodes beside it."""
    return [
        "--head",
        f"--port={port}",
        f"--node-ip-address={address}",
        "--include-dashboard=false",
        "--no-monitor",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--labels={HEAD_LABEL}=true",
        *([f"--redis-password={redis_password}"] if redis_password else []),
    ]


def node_arguments(
    head: str,
    address: str,
    name: str,
    labels: Mapping[str, str],
    *,
    member: str,
    cpus: int | None = None,
    gpus: int | None = None,
) -> list[str]:
    """Return the arguments of `ray start` for a node. `head`: HOST:PORT; `member`: see `MEMBER_LABEL`."""
    all_labels = {**labels, MEMBER_LABEL: member}
    return [
        f"--address={head}",
        f"--node-ip-address={address}",
        f"--node-name={name}",
        "--labels=" + ",".join(f"{label}={value}" for label, value in all_labels.items()),
        *([f"--num-cpus={cpus}"] if cpus is not None else []),
        *([f"--num-gpus={gpus}"] if gpus is not None else []),
    ]


def new_member() -> str:
    return secrets.token_hex(8)


class RayProcess:
    """A head or node of Ray in a session of its own, which ends when this process does."""

    def __init__(self, name: str, arguments: list[str], variables: Mapping[str, str], program: str = "") -> None:
        """`program`: the process of Ray without which it is of no use, `GCS` or `RAYLET`.

        `ray start --block` goes on when that has ended by SIGTERM, as of `ray stop`, or with status 0.
        """
        self.name, self._program = name, program
        self._watched: int | None = None  # the id of the process that runs the program
        self._watched_at = -math.inf
        # The paths of Ray's sockets are long, and those of Unix sockets are limited: not in the data folder.
        self.folder = Path(tempfile.mkdtemp(prefix="syringa-ray-"))
        self.log = self.folder / "ray-start.log"
        options = RayProcessOptions(
            arguments=[
                "start",
                "--block",
                *arguments,
                f"--temp-dir={self.folder}",
                f"--object-store-memory={OBJECT_STORE_BYTES}",
                "--include-log-monitor=false",
                "--min-worker-port=0",
                "--max-worker-port=0",
            ]
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "syringa.ray.processes"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables, FOLDER_VARIABLE: str(self.folder)},
                start_new_session=True,  # Ctrl-C is for this process, which drains first
            )
        managed_process.send_options(self.process, options)

    @property
    def running(self) -> bool:
        """Whether it runs, and its program, once that was started."""
        if self.process.poll() is not None:
            return False
        if self._watched is not None:
            return _runs(self._watched, self._program)
        now = time.monotonic()
        if self._program and now >= self._watched_at + WATCH_SECONDS:
            self._watched_at = now
            processes = _processes(self.process.pid, self.folder)
            self._watched = next((pid for pid in processes if _runs(pid, self._program)), None)
        return True

    def failure(self) -> str:
        """Return in one line why it has ended, as far as Ray says."""
        status = self.process.returncode
        if status is None:
            return f"{self._program} has ended"
        if status < 0:
            return managed_process.describe_exit(status)  # what Ray printed before is not the cause
        try:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        for mark in ("Error", "[exit code="):
            if found := [line for line in lines if mark in line]:
                return found[-1]
        return lines[-1] if lines else f"exit={status}"

    def stop(self) -> None:
        """End all its processes, and remove its files."""
        managed_process.terminate(self.process, STOP_SECONDS)
        _kill_processes(self.process.pid, self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_processes(session: int, folder: Path) -> None:
    """Kill what is left of a head or node. Without a head, some of Ray's processes outlive the others."""
    for pid in _processes(session, folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _processes(session: int, folder: Path) -> Iterator[int]:
    """Yield the processes of a head or node, without this one.

    They are recognized by their session, because Ray's agents overwrite their environment with their title, and by
    the variable, for processes in a session of their own.
    """
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if pid == os.getpid():
                continue
            if os.getsid(pid) == session or mark in (entry / "environ").read_bytes().split(b"\0"):
                yield pid


def _runs(pid: int, program: str) -> bool:
    """Return whether a process runs a program. One that has ended has no command line, even before it is reaped."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return False
    return os.path.basename(os.fsdecode(command)) == program


def wait_started(process: RayProcess, is_started: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Wait until a new process of Ray is part of the cluster. Raises `StartupError`."""
    deadline = time.monotonic() + seconds
    while not is_started():
        if not process.running:
            raise StartupError(f"{process.name} could not be started: {process.failure()}")
        if time.monotonic() > deadline:
            raise StartupError(f"{process.name} has not started within {seconds:.0f} s; its log is {process.log}")
        time.sleep(0.2)


def main() -> None:
    """Run `ray start` until the parent is gone."""
    from syringa.ray import internals

    options = managed_process.attach_to_parent(RayProcessOptions, watch=False)
    folder, orphaned = Path(os.environ[FOLDER_VARIABLE]), threading.Event()

    @atexit.register  # runs after what Ray registers
    def clean_up() -> None:
        _kill_processes(os.getpid(), folder)
        if orphaned.is_set():
            shutil.rmtree(folder, ignore_errors=True)

    def end_with_parent() -> None:
        while os.read(0, 4096):
            pass
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)  # Ray ends its processes
        time.sleep(STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True, name="parent-watch").start()
    internals.run_command(options.arguments)


if __name__ == "__main__":
    main()
