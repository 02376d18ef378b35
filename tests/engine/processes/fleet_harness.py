"""A fleet manager whose clock is that of the test, and a cluster that the test describes through a bridge's socket."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from syringa.config import Config, ModelSpec, Replicas
from syringa.engine.client import protocol
from syringa.engine.processes.control import AcquireModel, SupervisorReport, Suspects, WorkerState, acquire_request
from syringa.engine.processes.fleet_manager import FleetManager
from syringa.fleet.bridge_protocol import (
    FleetReport,
    FromBridge,
    KillReplica,
    LaunchReplica,
    ReplicaReport,
    RetireReplica,
    ToBridge,
    changes,
    initial_report,
)
from syringa.fleet.provider import Node
from syringa.types import EngineStats
from tests.engine.processes.stub_worker import INFO

harnesses: list[FleetHarness] = []  # of the current test, closed by the fixture


class FakeCluster:
    """Nodes and replicas as the test says. Several servers may use it."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = {name: Node(name, cpus=1) for name in nodes or ("n1", "n2", "n3")}
        self.replicas: dict[str, ReplicaReport] = {}
        self.reachable = True

    def set(self, id: str, **changes: Any) -> None:
        self.replicas[id] = msgspec.structs.replace(self.replicas[id], **changes)

    def load(self, id: str, **stats: Any) -> None:
        """Let a replica become ready, or change its statistics."""
        address = f"tcp:{self.replicas[id].node}:4000"
        self.set(id, phase="ready", info=INFO, address=address, fingerprint="f", reason="", stats=EngineStats(**stats))

    def end(self, id: str, **how: Any) -> None:
        self.set(id, phase="ended", address="", stats=None, **how)

    def report(self) -> FleetReport:
        if not self.reachable:
            return FleetReport(connected=False, reason="Ray's head does not answer")
        return FleetReport(list(self.nodes.values()), list(self.replicas.values()))

    def handle(self, message: ToBridge) -> None:
        match message:
            case LaunchReplica():
                if message.id not in self.replicas:
                    self.replicas[message.id] = initial_report(message)
            case RetireReplica(id, grace) if id in self.replicas:
                self.set(id, phase="draining", grace=grace)
            case KillReplica(id) if id in self.replicas:
                self.end(id)


class FleetHarness:
    """One server: its manager, and a bridge between it and the cluster."""

    def __init__(
        self,
        folder: str,
        cluster: FakeCluster | None = None,
        models: tuple[ModelSpec, ...] = (),
        lease: Callable[[], bool] = lambda: True,
        leave: Callable[[], bool] = lambda: True,
        **settings: Any,
    ) -> None:
        harnesses.append(self)
        self.now, self.cluster = 1000.0, cluster or FakeCluster()
        self.sent: list[ToBridge] = []  # to the bridge
        self.reports: list[SupervisorReport] = []
        self.selector = selectors.DefaultSelector()
        self.config = Config(model="default" if models else "/nowhere", models=models, cluster=True, **settings)
        self.manager = FleetManager(
            folder, self.config, self.selector, self.reports.append, holds_lease=lease,
            lease_reason=lambda: "another server decides", leave=leave, clock=lambda: self.now,
            wall=lambda: 1_800_000_000.0 + self.now,
        )  # fmt: skip
        self._bridge: socket.socket | None = None
        self._reported: FleetReport | None = None  # on this connection
        self.connect()

    def close(self) -> None:
        self.disconnect()
        self.manager.provider.close()
        self.selector.close()

    def connect(self) -> None:
        self._bridge = socket.socket(socket.AF_UNIX)
        self._bridge.connect(self.manager.provider.path)
        self._bridge.setblocking(False)
        self._reported = None
        self._frames: protocol.FrameDecoder[ToBridge] = protocol.FrameDecoder(msgspec.msgpack.Decoder(ToBridge))

    def disconnect(self) -> None:
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None

    def report(self) -> None:
        """Send a report, and let the manager read it."""
        if self._bridge is not None:
            self._bridge.sendall(protocol.frame(self._message()))
        self.manager.tick()
        self.manager.controller.tick()
        self.manager.tick()
        self.receive()

    def _message(self) -> FromBridge:
        """Return what a bridge would send: all of it, or what has changed."""
        before, after = self._reported, self.cluster.report()
        self._reported = after
        return changes(before, after) if before is not None and before.connected and after.connected else after

    def receive(self) -> None:
        """Let the cluster do what it was asked for."""
        if self._bridge is None:
            return
        try:
            data = self._bridge.recv(1 << 20)
        except BlockingIOError:
            return
        for message in self._frames.feed(data):
            self.sent.append(message)
            self.cluster.handle(message)

    def run_for(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.report()

    def acquire(self, spec: ModelSpec, **changes: Any) -> str:
        request: AcquireModel = msgspec.structs.replace(acquire_request(spec, self.config), **changes)
        model = self.manager.acquire(request)
        self.run_for(1.5)
        return model.key

    def serve(self, spec: ModelSpec, **changes: Any) -> list[str]:
        """Acquire a model, load all replicas that are started for it, and return their ids."""
        before = set(self.cluster.replicas)
        key = self.acquire(spec, **changes)
        ids = [id for id, each in self.cluster.replicas.items() if id not in before and each.model == key]
        for id in ids:
            self.cluster.load(id)
        self.run_for(1)
        return ids

    def model_keys(self) -> list[str]:
        """Return the keys of the models that are known."""
        return [each.key for each in self.manager.reports() if isinstance(each, WorkerState)]

    def state(self, key: str) -> WorkerState:
        states = [each for each in self.manager.reports() if isinstance(each, WorkerState) and each.key == key]
        return states[0]

    def statuses(self, key: str) -> dict[str, str]:
        return {each.id: each.status for each in self.state(key).replicas}

    @property
    def suspects(self) -> list[Suspects]:
        return [each for each in self.reports if isinstance(each, Suspects)]


def model(name: str = "m", low: int = 1, high: int = 1, **settings: object) -> ModelSpec:
    spec = ModelSpec(id=name, path=f"/models/{name}", replicas=Replicas(min=low, max=high), threads=1, **settings)  # type: ignore[arg-type]
    return msgspec.structs.replace(spec, preload=bool(spec.preload), idle_seconds=spec.idle_seconds or 0.0)


def launches(harness: FleetHarness) -> list[LaunchReplica]:
    return [each for each in harness.sent if isinstance(each, LaunchReplica)]


def retired(harness: FleetHarness) -> list[str]:
    return [each.id for each in harness.sent if isinstance(each, RetireReplica)]
