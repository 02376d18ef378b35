"""A Ray cluster on this machine, and the supervisor's end of a bridge to it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from syringa.cluster.folder import ClusterFolder
from syringa.cluster.own_address import own_address
from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import MessageConnection
from syringa.fleet.bridge_protocol import BridgeOptions, FleetReport, FleetUpdate, FromBridge, ReplicaReport
from syringa.fleet.provider import Node
from syringa.ray.processes import FOLDER_VARIABLE, environment

GUARD_SECONDS = 300.0
KNOWN_SECONDS = 4.0  # the server knows what a replica runs after 2 s, and later on a machine that is busy
# Below the ports that systems give to outgoing connections, which would take a port between its choice and its use.
_PORTS = itertools.count(20_000 + os.getpid() % 400 * 30)


def until(condition: Callable[[], Any], *, tick: Callable[[], object] = lambda: None) -> Any:
    """Poll a condition until it holds. Return its value."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "this takes too long"
        tick()
        time.sleep(0.05)
    return found


def free_port() -> int:
    """Return a port that is free now; Ray cannot be asked to choose that of its head."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("unreachable")


def cluster_folder(path: Path) -> ClusterFolder:
    folder = ClusterFolder(path)
    folder.create("node", ["localhost", "127.0.0.1", own_address()])
    return folder


def processes_with(variable: str, value: str) -> list[int]:
    """Return the ids of the processes with a variable in their environment."""
    wanted, found = f"{variable}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


class LocalCluster:
    """A head and nodes of Ray. The nodes are added and removed one by one."""

    def __init__(self, folder: ClusterFolder, port: int) -> None:
        self.folder, self.port = folder, port
        self.address = f"{own_address()}:{port}"
        self.temp = tempfile.mkdtemp(prefix="sy-")  # the paths of Ray's sockets are long
        self.raylets: dict[str, int] = {}  # process ids, by name of the node
        self.variables = {**environment(folder), FOLDER_VARIABLE: self.temp}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.cluster_process", own_address(), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.variables, "RAY_TMPDIR": self.temp},
            start_new_session=True,
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def add(self, name: str, *, cpus: int = 1, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        answer = self._do(do="add", node=name, cpus=cpus, labels=labels or {})
        assert isinstance(answer, dict)
        self.raylets[name] = answer["raylet"]
        return answer

    def remove(self, name: str) -> None:
        """Kill all processes of a node."""
        self._do(do="remove", node=name)

    def gcs(self) -> int:
        """Return the process id of the GCS."""
        return int(self._do(do="gcs"))

    def restart_gcs(self) -> None:
        self._do(do="restart gcs")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in processes_with(FOLDER_VARIABLE, self.temp):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temp, ignore_errors=True)

    def _do(self, **command: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            with contextlib.suppress(ValueError):  # Ray prints, too
                return json.loads(line)
        raise AssertionError("the cluster has ended")


class BridgePeer:
    """A bridge process, and the supervisor's end of its connection."""

    def __init__(self, options: BridgeOptions) -> None:
        self.options = options
        self.report = FleetReport(connected=False)
        self._listener = protocol.listen(options.socket)
        self._selector = selectors.DefaultSelector()
        self.start()

    def start(self) -> None:
        self.process = managed_process.spawn("syringa.ray.bridge", self.options)
        self._connection: MessageConnection[FromBridge] = until(self._accept)

    def _accept(self) -> MessageConnection[FromBridge] | None:
        assert self.process.poll() is None, "the bridge has ended"
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return None
        return MessageConnection(accepted, protocol.FrameDecoder(msgspec.msgpack.Decoder(FromBridge)), self._selector)

    def send(self, message: msgspec.Struct) -> None:
        self._connection.send(message)

    def tick(self) -> None:
        for message in self._connection.receive():
            self.report = self._merge(message) if isinstance(message, FleetUpdate) else message

    def _merge(self, update: FleetUpdate) -> FleetReport:
        """Return the last report with what has changed, without the loads."""
        nodes = {each.name: each for each in (*self.report.nodes, *update.nodes)}
        replicas = {each.id: each for each in (*self.report.replicas, *update.replicas)}
        for name in update.gone_nodes:
            del nodes[name]
        for id in update.gone_replicas:
            del replicas[id]
        return FleetReport(list(nodes.values()), list(replicas.values()))

    def until(self, condition: Callable[[FleetReport], Any]) -> Any:
        return until(lambda: condition(self.report), tick=self.tick)

    def node(self, name: str) -> Node | None:
        return next((each for each in self.report.nodes if each.name == name), None)

    def replica(self, id: str) -> ReplicaReport | None:
        return next((each for each in self.report.replicas if each.id == id), None)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self.report = FleetReport(connected=False)

    def close(self) -> None:
        self._connection.close()
        self._listener.close()
        managed_process.terminate(self.process, 10)


@contextlib.contextmanager
def local_cluster(folder: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(cluster_folder(folder / "cluster"), free_port())
    try:
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def bridge(cluster: LocalCluster, folder: Path) -> Iterator[BridgePeer]:
    peer = BridgePeer(
        BridgeOptions(
            socket=str(folder / "bridge.sock"),
            cluster_dir=str(cluster.folder.path),
            address=f"{own_address()}:1",
            ray_port=cluster.port,
        )
    )
    try:
        yield peer
    finally:
        peer.close()
