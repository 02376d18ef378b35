"""Where replicas fit: the room that nodes and pools have left, and the node that is chosen for a replica."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from syringa.fleet.pools import PoolSpec
from syringa.fleet.provider import Node

_UNLIMITED = math.inf
MAX_CANDIDATES = 8  # nodes that are compared for one that does not run the model yet


class ReplicaNeeds(NamedTuple):
    """What a replica of a model takes of a node."""

    gpus: int = 0  # on a node that has GPUs; at least 1, unless the model is for CPUs
    cpus: int = 0  # threads, where it runs on the CPU; 0: all of the node, shared with other replicas
    memory: int = 0  # bytes, where it runs on the CPU; 0: unknown
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @property
    def gpus_used(self) -> int:
        """The number of GPUs that it takes of a node that has some."""
        return 0 if self.device == "cpu" else max(self.gpus, 1)

    def gpus_on(self, node: Node) -> int:
        """Return the number of GPUs that it takes of a node; 0: it runs on the CPU."""
        return self.gpus_used if node.gpus else 0

    def cpus_on(self, node: Node) -> int:
        """Return the number of threads that it takes of a node; 0: none that are counted."""
        return 0 if self.gpus_on(node) else self.cpus or node.cpus


class NodeRoom:
    """What a node has left."""

    __slots__ = ("count", "cpus", "gpus", "memory", "models", "node", "penalty", "shared", "threads")

    def __init__(self, node: Node, penalty: int = 0) -> None:
        """`penalty`: how often replicas have failed there of late."""
        self.node, self.penalty = node, penalty
        self.gpus = node.gpus
        self.cpus: float = node.cpus or _UNLIMITED
        self.memory: float = node.memory or _UNLIMITED
        self.count = 0  # replicas
        self.shared = False  # whether a replica uses all of its threads
        self.threads = 0  # of the pool that are in use, on a node without GPUs
        self.models: tuple[str, ...] = ()

    def key(self) -> tuple[int, int, str]:
        """Nodes are chosen in this order: without failures, with few replicas."""
        return self.penalty, self.count, self.node.name

    def fits(self, needs: ReplicaNeeds) -> bool:
        if self.node.gpus and needs.device != "cpu":
            return self.gpus >= max(needs.gpus, 1)
        if needs.device == "cuda" or needs.gpus > 1:
            return False
        return self.cpus >= needs.cpus and self.memory >= needs.memory

    def fits_without(self, others: Iterable[ReplicaNeeds], needs: ReplicaNeeds) -> bool:
        """Return whether a replica would fit if others, which are there, had ended."""
        if self.node.gpus and needs.device != "cpu":
            return self.gpus + sum(each.gpus_on(self.node) for each in others) >= max(needs.gpus, 1)
        if needs.device == "cuda" or needs.gpus > 1:
            return False
        cpus, memory = self.cpus, self.memory
        for each in others:
            if not each.gpus_on(self.node):
                cpus, memory = cpus + each.cpus, memory + each.memory
        return cpus >= needs.cpus and memory >= needs.memory

    def new_threads(self, needs: ReplicaNeeds) -> int:
        """Return the threads of the pool that one more replica takes, on a node without GPUs."""
        if self.node.gpus or self.shared:
            return 0
        if needs.cpus:
            return needs.cpus
        return int(self.cpus) if self.node.cpus else 0  # all that were not counted yet

    def take(self, model: str, needs: ReplicaNeeds) -> tuple[int, int]:
        """Account for a replica. Return the GPUs and the threads that it takes of the pool."""
        gpus, threads = needs.gpus_on(self.node), self.new_threads(needs)
        self.count += 1
        self.threads += threads
        self.models += (model,)
        if gpus:
            self.gpus -= gpus
        else:
            self.cpus -= needs.cpus
            self.memory -= needs.memory
            self.shared = self.shared or not needs.cpus
        return gpus, threads


class PoolRoom:
    """What a pool has left: its nodes and, where it has limits, what is in use are added before places are chosen."""

    def __init__(self, spec: PoolSpec, position: int) -> None:
        self.spec, self.position = spec, position
        self.open = True
        self.nodes: dict[str, NodeRoom] | None = None  # on which replicas may be started; None: not added yet
        self.offers = False  # whether any nodes are offered, with room or without
        self.total_gpus = self.total_cpus = 0  # of nodes that are not lost, offered or not
        self.used_gpus = self.used_cpus = 0
        self._candidates: dict[ReplicaNeeds, list[tuple[int, int, str]]] = {}  # heaps
        self._limited: dict[ReplicaNeeds, str] = {}  # which limit of the pool is reached

    @property
    def is_limited(self) -> bool:
        capacity = self.spec.capacity
        return bool(capacity.max_gpus) or capacity.max_utilization_pct < 100

    @property
    def limits(self) -> tuple[float, float]:
        """The GPUs and threads that may be in use."""
        share = self.spec.capacity.max_utilization_pct / 100
        gpus = math.floor(self.total_gpus * share + 1e-9) if share < 1 else math.inf
        cpus = math.floor(self.total_cpus * share + 1e-9) if share < 1 else math.inf
        return min(gpus, self.spec.capacity.max_gpus or math.inf), cpus

    def choose(self, model: str, needs: ReplicaNeeds, *, max_penalty: float = _UNLIMITED) -> NodeRoom | None:
        """Take a place for a replica, and return its node; None if there is none.

        `max_penalty`: of nodes that may be chosen, see `NodeRoom`.
        """
        assert self.nodes is not None
        heap = self._candidates.get(needs)
        if heap is None:
            heap = [room.key() for room in self.nodes.values() if room.fits(needs)]
            heapq.heapify(heap)
            self._candidates[needs] = heap
        found: list[NodeRoom] = []
        gpu_limit, cpu_limit = self.limits
        while heap and len(found) < MAX_CANDIDATES:
            key = heapq.heappop(heap)
            room = self.nodes[key[2]]
            if not room.fits(needs):
                continue  # for good: room is only taken
            if room.key() != key:
                heapq.heappush(heap, room.key())
                continue
            if room.penalty > max_penalty:  # as have all that follow
                heapq.heappush(heap, key)
                break
            gpus, threads = needs.gpus_on(room.node), room.new_threads(needs)
            if gpus and self.used_gpus + gpus > gpu_limit:
                self._limited[needs] = f"pool {self.spec.name} uses {self.used_gpus} of {gpu_limit:.0f} GPUs"
                continue
            if threads and self.used_cpus + threads > cpu_limit:
                self._limited[needs] = f"pool {self.spec.name} uses {self.used_cpus} of {cpu_limit:.0f} CPU threads"
                continue
            found.append(room)
            if model not in room.models:
                break
        chosen = min(found, key=lambda room: (room.penalty, model in room.models, room.count), default=None)
        if chosen is not None:
            gpus, threads = chosen.take(model, needs)
            self.used_gpus += gpus
            self.used_cpus += threads
        for room in found:
            heapq.heappush(heap, room.key())
        return chosen

    def shortage(self, needs: ReplicaNeeds) -> str:
        """Return why `choose` has found no place, in words."""
        if not self.open:
            return f"pool {self.spec.name} is closed"
        if not self.offers:
            return f"pool {self.spec.name} has no node that may be used now"
        return self._limited.get(needs) or f"no node of pool {self.spec.name} has room"


def in_preference(pools: Iterable[PoolRoom]) -> list[PoolRoom]:
    """Return the pools in the order in which models that name none use them."""
    return sorted(pools, key=lambda pool: (-pool.spec.preemption.priority, pool.position))
