"""What the controller decides about and remembers, and the rules by which nodes are offered and reclaimed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from syringa.fleet.placement import PoolRoom, ReplicaNeeds
from syringa.fleet.pools import POOL_LABEL, NodeIndex, PoolTarget, index_nodes, owner_activity, with_default
from syringa.fleet.provider import Node, Replica
from syringa.fleet.schedule import is_open

SCALE_UP_SECONDS = 2.0  # requests have waited for so long, without a pause
SPARE_LOAD = 0.8  # of a full replica, up to which those of a model are filled when others need their room
SCALE_DOWN_SECONDS = 60.0  # a replica above the minimum has been idle for so long
SCALE_DOWN_GRACE = 30.0  # for a request that reached it at that moment
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 300.0  # after a replica failed to start or died; doubled each time
NODE_MEMORY_SECONDS = 600.0  # after which failures on a node are forgotten
MOVE_AFTER_SECONDS = 60.0  # a preferred pool has been open for so long before replicas move there
MOVE_BEFORE_SECONDS = 600.0  # and stays open for at least so long
UNMEASURED_SECONDS = 30.0  # after which a node whose load is not measured is given back to its owner

StartCause = Literal["minimum", "waiting", "preferred_pool"]
StopCause = Literal[
    "node_drained", "pool_closed", "owner_returned", "capacity", "preempted",  # evictions
    "idle", "surplus", "replaced",
]  # fmt: skip
EVICTIONS: tuple[StopCause, ...] = ("node_drained", "pool_closed", "owner_returned", "capacity", "preempted")


@dataclass(frozen=True)
class ModelTarget:
    """What is wanted of a model."""

    key: str
    name: str  # for logs
    min_replicas: int = 1
    max_replicas: int = 1
    active: bool = True  # whether it is loaded, being loaded or in use; otherwise the first request starts a replica
    pools: Sequence[str] = ()  # in which it may run, the preferred one first; none: any, by their priority
    gpus: int = 0  # of a replica; see `ReplicaNeeds`, also for the following
    cpus: int = 0
    memory: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @property
    def needs(self) -> ReplicaNeeds:
        return ReplicaNeeds(self.gpus, self.cpus, self.memory, self.device)


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """What the controller remembers of a model from one snapshot to the next."""

    waiting_since: float | None = None  # requests have waited ever since
    failures: int = 0  # in a row
    failed_at: float = -math.inf
    replaces: str = ""  # a replica in a less preferred pool, and the one that takes its place once it is ready
    replacement: str = ""
    complete: bool = False  # whether its minimum of replicas has been ready
    short_since: float | None = None  # when one of these was lost
    full_load: int = 0  # requests that a replica ran while others waited for it, the last time; 0: none have waited


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """What the controller remembers of a node."""

    idle_since: float | None = None  # its owner has left it alone ever since; None: not now
    unmeasured_since: float | None = None
    failures: int = 0  # of replicas, until none has failed for a while
    failed_at: float = -math.inf


NO_NODE_HISTORY = NodeHistory()


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """What the controller remembers of a pool."""

    opened_at: float | None = None  # None: it is not open
    changes_at: float | None = None  # Unix time at which its schedule next opens or closes it; None: never
    overridden: bool = False  # whether an operator has opened or closed it


@dataclass(frozen=True)
class FleetSnapshot:
    now: float
    models: Sequence[ModelTarget]
    replicas: Sequence[Replica]
    nodes: Sequence[Node]
    history: Mapping[str, ModelHistory]  # by key of the model
    pools: Sequence[PoolTarget] = ()  # none: all nodes are in one that is always open
    wall: float = 0.0  # Unix time
    node_history: Mapping[str, NodeHistory] = field(default_factory=dict)
    pool_history: Mapping[str, PoolHistory] = field(default_factory=dict)
    known_index: NodeIndex | None = None  # of these nodes and pools, where an earlier snapshot had the same

    @functools.cached_property
    def index(self) -> NodeIndex:
        return self.known_index or index_nodes(self.pools, self.nodes)

    @property
    def pool_of(self) -> Mapping[str, str]:
        """The names of pools by those of their nodes. A node that belongs to none is not there."""
        return self.index.pool_of


@dataclass(frozen=True)
class StartReplica:
    model: str
    node: str
    reason: str
    cause: StartCause = "minimum"
    replaces: str = ""  # the replica that is stopped when this one is ready


@dataclass(frozen=True)
class StopReplica:
    replica: str
    grace: float
    reason: str
    cause: StopCause = "surplus"


Decision = StartReplica | StopReplica


@dataclass(frozen=True)
class Plan:
    """The decisions of one snapshot, and the models that have fewer replicas than their minimum for want of room."""

    decisions: list[Decision]
    shortages: dict[str, str]  # reason by key of the model


@dataclass(frozen=True)
class Reclaim:
    """Why nothing may run on a node. `cause` is None where what runs there may stay."""

    cause: StopCause | None
    reason: str
    grace: float


def pool_is_open(pool: PoolTarget, wall: float) -> bool:
    """Return whether a pool offers its nodes at a Unix time; in `idle` mode, those that are idle."""
    return is_open(pool.spec.schedule, wall) if pool.override is None else pool.override


def is_offered(node: Node, pool: PoolRoom | None, history: NodeHistory, now: float) -> bool:
    """Return whether replicas may be started on a node."""
    if pool is None or not pool.open or node.condition != "ready":
        return False
    since = history.idle_since
    return pool.spec.schedule.mode != "idle" or (since is not None and now - since >= pool.spec.idle.after)


def offered_nodes(snapshot: FleetSnapshot, pools: Iterable[PoolRoom]) -> set[str]:
    """Return the names of all nodes for which `is_offered` holds."""
    offered: set[str] = set()
    index, histories, now = snapshot.index, snapshot.node_history, snapshot.now
    for pool in pools:
        ready = index.ready.get(pool.spec.name, frozenset())
        if pool.open and pool.spec.schedule.mode == "idle":
            nodes = (node for node in index.members[pool.spec.name] if node.name in ready) if ready else ()
            offered.update(
                node.name for node in nodes if is_offered(node, pool, histories.get(node.name, NO_NODE_HISTORY), now)
            )
        elif pool.open:
            offered |= ready
    return offered


def _why_no_pool(node: Node, pools: Sequence[PoolTarget]) -> str:
    named = node.labels.get(POOL_LABEL)
    if not named:
        return "belongs to no pool"
    if spec := next((each.spec for each in pools if each.spec.name == named), None):
        wanted = ", ".join(f"{label}={value}" for label, value in sorted(spec.selector.items()))
        return f"is labeled pool={named}, but the selector of {named} is {wanted}"
    return f"is in the pool {named}, which is not configured"


def reclaim_reason(
    node: Node, pool: PoolRoom | None, history: NodeHistory, now: float, pools: Sequence[PoolTarget] = ()
) -> Reclaim | None:
    """Return why nothing may be started on a node that is not lost; None if it is offered.

    `pools`: those that are configured.
    """
    if is_offered(node, pool, history, now):
        return None
    grace = SCALE_DOWN_GRACE if pool is None else pool.spec.preemption.grace_period
    if node.draining:
        grace = grace if node.drain_grace is None else node.drain_grace
        return Reclaim("node_drained", f"node {node.name} is drained", grace)
    if pool is None:
        return Reclaim("pool_closed", f"node {node.name} {_why_no_pool(node, pools)}", grace)
    if not pool.open:
        return Reclaim("pool_closed", f"pool {pool.spec.name} is closed", grace)
    activity = owner_activity(pool.spec.idle, node)
    if node.owner_load is None:
        lasting = history.unmeasured_since is not None and now - history.unmeasured_since >= UNMEASURED_SECONDS
        return Reclaim("owner_returned" if lasting else None, f"node {node.name}: {activity}", grace)
    if activity:
        return Reclaim("owner_returned", f"node {node.name}: {activity}", grace)
    return Reclaim(None, f"node {node.name} has been idle for less than {pool.spec.idle.after:g} s", grace)


def pool_rooms(snapshot: FleetSnapshot) -> list[PoolRoom]:
    """Return the pools in their order, still without nodes."""
    rooms = []
    for position, pool in enumerate(with_default(snapshot.pools)):
        room = PoolRoom(pool.spec, position)
        room.open = pool_is_open(pool, snapshot.wall)
        rooms.append(room)
    return rooms


def recent_failures(history: NodeHistory, now: float) -> int:
    """Return how often replicas have failed on a node of late. Other nodes are chosen first."""
    return history.failures if now - history.failed_at < NODE_MEMORY_SECONDS else 0


def backoff(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return min(MIN_BACKOFF_SECONDS * 2 ** min(failures - 1, 32), MAX_BACKOFF_SECONDS) if failures else 0.0
