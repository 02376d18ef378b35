"""The simulated provider: nodes with GPUs and disks, replicas that fetch, load, serve and end."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.fleet_sim.engine import ModelClients
from bench.fleet_sim.event_loop import EventLoop
from bench.fleet_sim.replica import BatchedReplica
from bench.fleet_sim.scenario import GIGABYTE, Scenario, SimulatedPool
from bench.fleet_sim.shared_link import SharedLink
from syringa.fleet.provider import Node, OwnerLoad, Replica, ReplicaEvent

OWNER_LOAD = OwnerLoad(gpu_utilization_pct=80.0, gpu_memory_bytes=8 << 30)
START_SECONDS = 1.0  # from the decision until the process on the node begins
LOST_SECONDS = 60.0  # for which a lost node is still listed


@dataclass(eq=False)
class SimulatedNode:
    """A node. `view` is what the controller sees of it."""

    pool: SimulatedPool
    view: Node
    free_gpus: int
    files: OrderedDict[int, float]  # gigabytes of models on its disk, the last used one last
    replicas: dict[str, BatchedReplica] = field(default_factory=dict)
    alive: bool = True
    listed: bool = True  # whether the provider reports it: it finds out late that one is gone
    changes: int = 0  # of being alive
    owner_away: bool = True  # for as long as its pool asks for
    owner_left_at: float | None = None


class SimulatedFleet:
    """What runs the replicas: a `ReplicaProvider`."""

    def __init__(self, scenario: Scenario, loop: EventLoop, models: Sequence[ModelClients], seed: int) -> None:
        self.scenario, self.loop, self.models = scenario, loop, models
        self.positions = {clients.model.name: index for index, clients in enumerate(models)}
        self.nodes_by_name: dict[str, SimulatedNode] = {}
        self.running: dict[str, BatchedReplica] = {}
        self.link = SharedLink(loop, scenario.server_bandwidth, scenario.node_bandwidth)
        self.starts = self.failed_starts = 0
        self.fetched_bytes = 0.0
        self.load_times: list[float] = []
        self._events: list[ReplicaEvent] = []
        self.offers_changed = True  # whether a node has come, gone or changed
        self._nodes: list[Node] | None = None
        self._count = 0
        self._random = random.Random(seed + 1)
        for pool in scenario.pools:
            for number in range(pool.nodes):
                self._add_node(pool, f"{pool.name}-{number:03}")

    def _add_node(self, pool: SimulatedPool, name: str) -> None:
        load = OwnerLoad() if pool.mode == "idle" else None
        view = Node(name, labels={"pool": pool.name}, gpus=pool.gpus, cpus=16 * pool.gpus, owner_load=load)
        files: OrderedDict[int, float] = OrderedDict()
        order = list(enumerate(self.scenario.models))
        self._random.shuffle(order)
        for index, model in order:
            fits = sum(files.values()) + model.gigabytes <= self.scenario.cache_gigabytes
            if pool.name in model.pools and fits and self._random.random() < self.scenario.weights_cached:
                files[index] = model.gigabytes
        self.nodes_by_name[name] = SimulatedNode(pool, view, pool.gpus, files)

    # ReplicaProvider

    def nodes(self) -> Sequence[Node]:
        if self._nodes is None:
            self._nodes = [each.view for each in self.nodes_by_name.values() if each.listed]
        return self._nodes

    def replicas(self) -> Sequence[Replica]:
        now = self.loop.now
        return [
            Replica(
                each.id,
                each.model.name,
                each.node,
                each.condition,
                each.running,
                each.queued,
                now - each.idle_since if each.condition == "ready" and not each.running and not each.queued else 0.0,
                each.started_at,
            )
            for each in self.running.values()
        ]

    def start(self, model: str, node: str) -> str:
        self._count += 1
        self.starts += 1
        clients, place = self.models[self.positions[model]], self.nodes_by_name[node]
        id = f"{model}-{self._count:06x}"
        replica = BatchedReplica(
            id, clients.model, node, self.scenario, self.loop, clients, clients.work, self.loop.now
        )
        replica.frozen = not place.alive
        if not place.listed or place.free_gpus < clients.model.gpus:
            self.failed_starts += 1
            self._events.append(ReplicaEvent("failed", id, model, f"{node} has no place for it"))
            return id
        place.free_gpus -= clients.model.gpus
        clients.present += 1
        place.replicas[id] = self.running[id] = replica
        self.loop.after(START_SECONDS, self._fetch, replica)
        return id

    def stop(self, replica: str, grace: float) -> None:
        found = self.running.get(replica)
        if found is None or found.condition == "draining" or found.frozen:
            return
        was_ready, found.condition = found.condition == "ready", "draining"
        found.clients.present -= 1
        found.drained_at = self.loop.now + grace
        if not was_ready or not found.streams():
            self.end(found, "drain")
            return
        self.loop.at(found.drained_at, self._grace_over, found)
        found.clients.replica_draining(found)

    def events(self) -> Sequence[ReplicaEvent]:
        events, self._events = self._events, []
        return events

    # From the start of a replica to its end

    def _is_running(self, replica: BatchedReplica) -> bool:
        return replica.id in self.running and not replica.frozen and replica.condition != "draining"

    def _fetch(self, replica: BatchedReplica) -> None:
        if not self._is_running(replica):
            return
        files, index = self.nodes_by_name[replica.node].files, self.positions[replica.model.name]
        if index in files:
            files.move_to_end(index)
            self._load(replica)
            return
        replica.condition = "fetching"
        size = replica.model.gigabytes * GIGABYTE
        self.fetched_bytes += size
        self.link.fetch(size, self._fetched, replica)

    def _fetched(self, replica: BatchedReplica) -> None:
        if not self._is_running(replica):
            return
        node = self.nodes_by_name[replica.node]
        node.files[self.positions[replica.model.name]] = replica.model.gigabytes
        used = {self.positions[each.model.name] for each in node.replicas.values()}
        for index in [each for each in node.files if each not in used]:
            if sum(node.files.values()) > self.scenario.cache_gigabytes:
                del node.files[index]
        self._load(replica)

    def _load(self, replica: BatchedReplica) -> None:
        replica.condition = "starting"
        self.loop.after(replica.model.load_seconds, self._ready, replica)

    def _ready(self, replica: BatchedReplica) -> None:
        if not self._is_running(replica):
            return
        replica.condition = "ready"
        replica.ready_at = replica.idle_since = self.loop.now
        self.load_times.append(self.loop.now - replica.started_at)
        self._events.append(ReplicaEvent("ready", replica.id, replica.model.name))
        replica.clients.replica_ready(replica)

    def _grace_over(self, replica: BatchedReplica) -> None:
        if replica.id in self.running and not replica.frozen:
            self.end(replica, "drain")

    def end(self, replica: BatchedReplica, reason: str) -> None:
        """End a replica, and move what it still runs."""
        if self.running.pop(replica.id, None) is None:
            return
        if replica.condition != "draining":
            replica.clients.present -= 1
        replica.clients.replica_gone(replica, reason)
        replica.freeze()
        node = self.nodes_by_name[replica.node]
        del node.replicas[replica.id]
        node.free_gpus += replica.model.gpus
        self._events.append(ReplicaEvent("ended", replica.id, replica.model.name, reason))

    # Nodes that come and go

    def set_view(self, node: SimulatedNode, **changes: object) -> None:
        node.view = replace(node.view, **changes)  # type: ignore[arg-type]
        self._nodes, self.offers_changed = None, True

    def lose(self, node: SimulatedNode) -> None:
        """A node is gone without notice. Clients find out first, and then the provider."""
        node.alive, node.changes, self.offers_changed = False, node.changes + 1, True
        for replica in node.replicas.values():
            replica.freeze()
        self.loop.after(self.scenario.silence_seconds, self._silent, (node, node.changes))
        self.loop.after(self.scenario.node_timeout, self._report_lost, (node, node.changes))

    def _silent(self, lost: tuple[SimulatedNode, int]) -> None:
        node, changes = lost
        if node.changes == changes:
            for replica in list(node.replicas.values()):
                if replica.condition in ("ready", "draining"):
                    replica.clients.replica_silent(replica)

    def _report_lost(self, lost: tuple[SimulatedNode, int]) -> None:
        node, changes = lost
        if node.changes == changes:
            self.set_view(node, condition="lost")
            self._end_all(node, "crash")
            self.loop.after(LOST_SECONDS, self._forget, lost)

    def _forget(self, lost: tuple[SimulatedNode, int]) -> None:
        node, changes = lost
        if node.changes == changes:
            node.listed, self._nodes = False, None

    def _end_all(self, node: SimulatedNode, reason: str) -> None:
        for replica in list(node.replicas.values()):
            self.end(replica, reason)

    def leave(self, node: SimulatedNode) -> None:
        """A drained node goes away."""
        node.alive, node.changes, self.offers_changed = False, node.changes + 1, True
        node.listed, self._nodes = False, None
        self._end_all(node, "drain")

    def join(self, node: SimulatedNode) -> None:
        """A node is back. If it was lost for a moment only, the replicas of before are found to have ended."""
        self._end_all(node, "crash")
        node.alive, node.listed, node.changes = True, True, node.changes + 1
        self.set_view(node, condition="ready", drain_grace=None, joined_at=self.loop.now)
