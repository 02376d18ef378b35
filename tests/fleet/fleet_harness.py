"""A cluster of the test, in which replicas load and drain by a clock of the test, and the controller above it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

from syringa.fleet.controller import Controller
from syringa.fleet.decisions import ModelTarget
from syringa.fleet.overrides import PoolOverrides
from syringa.fleet.pools import PoolSpec
from syringa.fleet.provider import Node, OwnerLoad, Replica, ReplicaEvent
from syringa.fleet.status import NodeStatus, PoolStatus

BUSY = OwnerLoad(gpu_utilization_pct=80.0, cpu_pct=80.0)
IDLE = OwnerLoad()


def gpu_node(name: str, pool: str = "", gpus: int = 1, *, load: OwnerLoad | None = None) -> Node:
    return Node(name, labels={"pool": pool} if pool else {}, gpus=gpus, cpus=16, owner_load=load)


class FakeCluster:
    """A provider: a replica is ready after `load_seconds`, and a stopped one is gone after its grace period."""

    def __init__(self, nodes: Sequence[Node], load_seconds: float = 5.0) -> None:
        self.now, self.load_seconds = 0.0, load_seconds
        self.machines = {node.name: node for node in nodes}
        self.running: dict[str, Replica] = {}
        self.stops: list[tuple[str, float]] = []
        self.failing: set[str] = set()  # nodes on which replicas fail to start
        self._changes: dict[str, float] = {}  # when a replica is ready or gone
        self._events: list[ReplicaEvent] = []
        self._numbers = itertools.count(1)

    def nodes(self) -> Sequence[Node]:
        return list(self.machines.values())

    def replicas(self) -> Sequence[Replica]:
        return list(self.running.values())

    def start(self, model: str, node: str) -> str:
        id = f"{model}-{next(self._numbers)}"
        self.running[id] = Replica(id, model, node, "starting", started_at=self.now)
        self._changes[id] = self.now + self.load_seconds
        return id

    def stop(self, replica: str, grace: float) -> None:
        self.stops.append((replica, grace))
        self.running[replica] = dataclasses.replace(self.running[replica], condition="draining")
        self._changes[replica] = self.now + grace

    def events(self) -> Sequence[ReplicaEvent]:
        happened, self._events = self._events, []
        return happened

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for id in [id for id, due in self._changes.items() if due <= self.now]:
            del self._changes[id]
            replica = self.running[id]
            if replica.condition == "draining":
                self._end(id, "ended")
            elif replica.node in self.failing:
                self._end(id, "failed")
            else:
                self.running[id] = dataclasses.replace(replica, condition="ready")
                self._events.append(ReplicaEvent("ready", id, replica.model))

    def lose(self, node: str) -> None:
        """Lose a node and what runs on it. It is reported as lost until `recover` is called."""
        self.machines[node] = dataclasses.replace(self.machines[node], condition="lost")
        for id in [each.id for each in self.running.values() if each.node == node]:
            self._changes.pop(id, None)
            self._end(id, "failed")

    def crash(self, id: str) -> None:
        self._end(id, "failed")

    def change(self, node: str, **fields: object) -> None:
        self.machines[node] = dataclasses.replace(self.machines[node], **fields)  # type: ignore[arg-type]

    def load(self, id: str, **fields: object) -> None:
        self.running[id] = dataclasses.replace(self.running[id], **fields)  # type: ignore[arg-type]

    def _end(self, id: str, kind: str) -> None:
        replica = self.running.pop(id)
        self._events.append(ReplicaEvent(kind, id, replica.model))  # type: ignore[arg-type]


class PoolHarness:
    """A controller of a cluster. `models` may be changed at any time."""

    def __init__(
        self,
        nodes: Sequence[Node],
        models: Sequence[ModelTarget],
        pools: Sequence[PoolSpec] = (),
        *,
        begin: str = "2026-01-30 12:00",
        zone: str = "Europe/Berlin",
        load_seconds: float = 5.0,
        lease: bool = True,
    ) -> None:
        self.cluster, self.models = FakeCluster(nodes, load_seconds), list(models)
        self._zone, self._pools = ZoneInfo(zone), pools
        self._begin = datetime.fromisoformat(begin).replace(tzinfo=self._zone).timestamp()
        self._overrides, self._lease = PoolOverrides(), lease
        self.restart()

    def restart(self) -> None:
        """Begin with a controller that remembers nothing but what was stored."""
        self.controller = Controller(
            self.cluster,
            lambda: self.models,
            lambda: self.cluster.now,
            lambda: self._lease,
            pools=self._pools,
            overrides=self._overrides,
            wall=lambda: self._begin + self.cluster.now,
        )

    def run_for(self, seconds: int) -> None:
        for _ in range(seconds):
            self.controller.tick()
            self.cluster.advance(1.0)

    def run_until(self, text: str) -> None:
        target = datetime.fromisoformat(text).replace(tzinfo=self._zone).timestamp()
        self.run_for(round(target - self._begin - self.cluster.now))

    def skip_to(self, text: str) -> None:
        """Let time pass without decisions."""
        target = datetime.fromisoformat(text).replace(tzinfo=self._zone).timestamp()
        self.cluster.advance(target - self._begin - self.cluster.now)

    def ready(self, model: str | None = None) -> list[str]:
        """The nodes of ready replicas."""
        found = [each for each in self.cluster.running.values() if each.condition == "ready"]
        return sorted(each.node for each in found if model in (None, each.model))

    def only(self, model: str) -> Replica:
        (replica,) = (each for each in self.cluster.running.values() if each.model == model)
        return replica

    def pool(self, name: str) -> PoolStatus:
        return next(each for each in self.controller.status().pools if each.name == name)

    def node(self, name: str) -> NodeStatus:
        return next(each for each in self.controller.status().nodes if each.name == name)
