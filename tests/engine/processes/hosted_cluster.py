"""A cluster without Ray: a thread that speaks the bridge's protocol and hosts replicas as child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from syringa.cluster.folder import ClusterFolder
from syringa.engine.client import protocol
from syringa.engine.processes.replica_host import ReplicaHost
from syringa.fleet.bridge_protocol import (
    FleetReport,
    KillReplica,
    LaunchReplica,
    ReleaseNode,
    RetireReplica,
    ToBridge,
)
from syringa.fleet.provider import Node
from tests.engine.processes import stub_worker

TICK_SECONDS = 0.02
HOST = "127.0.0.1"


class HostedCluster:
    """Nodes, whose replicas run on this machine, and the bridge to one server. Use as a context manager."""

    def __init__(self, folder: ClusterFolder, *nodes: str) -> None:
        self.nodes = {name: Node(name, cpus=1) for name in nodes}
        self.released: list[ReleaseNode] = []
        self._cluster = folder
        self._hosts: dict[str, tuple[ReplicaHost, LaunchReplica]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosted-cluster")
        self._bridge: socket.socket | None = None
        self._path = ""  # of the server's socket; empty: the bridge does not run

    def __enter__(self) -> HostedCluster:
        self._sockets = tempfile.TemporaryDirectory(prefix="syringa-test-")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join()
        self.disconnect()
        for host, _ in self._hosts.values():
            host.stop()
        self._sockets.cleanup()

    # What a test does to it

    def connect(self, path: str) -> None:
        """Start the bridge to a server. That to another one ends."""
        self.disconnect()
        with self._lock:
            self._path = path

    def disconnect(self) -> None:
        """Let the bridge die."""
        with self._lock:
            self._path = ""
            if self._bridge is not None:
                self._bridge.close()
                self._bridge = None

    def hold(self) -> AbstractContextManager[None]:
        """Let no request end that begins meanwhile at a stub worker."""
        return stub_worker.hold(Path(self._sockets.name))

    def pids(self) -> dict[str, int]:
        """Return the process ids of workers, by replica."""
        with self._lock:
            return {id: host.pid for id, (host, _) in self._hosts.items() if host.pid is not None}

    def node_of(self, replica: str) -> str:
        with self._lock:
            return self._hosts[replica][1].node

    def remove_node(self, name: str) -> None:
        """Let a node disappear with everything on it."""
        with self._lock:
            del self.nodes[name]
            for id, (host, launch) in list(self._hosts.items()):
                if launch.node == name:
                    if host.pid is not None:
                        os.kill(host.pid, signal.SIGKILL)
                    host.stop(0.0)
                    del self._hosts[id]

    # The thread

    def _run(self) -> None:
        while not self._stopping.wait(TICK_SECONDS):
            with self._lock:
                for host, _ in self._hosts.values():
                    host.tick()
                with contextlib.suppress(OSError):
                    self._exchange()

    def _exchange(self) -> None:
        bridge = self._bridge
        if bridge is None:
            if not self._path:
                return
            bridge = self._bridge = socket.socket(socket.AF_UNIX)
            bridge.connect(self._path)
            bridge.setblocking(False)
            self._frames: protocol.FrameDecoder[ToBridge] = protocol.FrameDecoder(msgspec.msgpack.Decoder(ToBridge))
        try:
            data = bridge.recv(1 << 20)
            if not data:
                bridge.close()
                self._bridge, self._path = None, ""
                return
            for message in self._frames.feed(data):
                self._handle(message)
        except BlockingIOError:
            pass
        replicas = [host.status() for host, _ in self._hosts.values()]
        bridge.sendall(protocol.frame(FleetReport(list(self.nodes.values()), replicas)))

    def _handle(self, message: ToBridge) -> None:
        match message:
            case LaunchReplica(id) if id not in self._hosts and message.node in self.nodes:
                host = ReplicaHost(
                    message, host=HOST, tls=self._cluster.files("server"), folder=str(Path(self._sockets.name))
                )
                self._hosts[id] = (host, message)
            case RetireReplica(id, grace) if id in self._hosts:
                self._hosts[id][0].drain(grace)
            case KillReplica(id) if id in self._hosts:
                self._hosts[id][0].stop(0.0)
            case ReleaseNode():
                self.released.append(message)
