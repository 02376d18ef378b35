"""The messages between the supervisor and the bridge to a cluster, msgpack frames on a Unix socket.

The supervisor listens, the bridge connects. The bridge sends a `FleetReport`, which is complete, when it has connected
and when the cluster can be reached again. From then on it sends a `FleetUpdate` at every change and every
`REPORT_SECONDS`, with what has changed since its last message. What the supervisor sends is a wish: what becomes of it
is seen in the reports. A wish may be repeated, and may concern a replica or a node that is gone.

A supervisor or a bridge that is started again finds the replicas that run: nothing here depends on either of them
having been there before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syringa.fleet.provider import Node
from syringa.types import EngineStats, LoadProgress, ModelInfo

NO_STATS = EngineStats()

REPORT_SECONDS = 0.5
ENDED_SECONDS = 30.0  # for which a replica that has ended is reported
STARTING = "the bridge to Ray is starting"  # the reason of a bridge that has not tried to reach the cluster yet

ReplicaPhase = Literal["queued", "fetching", "loading", "ready", "hanging", "draining", "ended"]


class BridgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a bridge process, the first line of its standard input."""

    socket: str  # of the supervisor
    cluster_dir: str  # folder of the certificates and tokens
    address: str = ""  # host:port of the cluster's server; its host is that of Ray's head
    ray_port: int = 6379
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"


# To the bridge


class LaunchReplica(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start a replica on a node. It exists, as "queued", from the next report on."""

    id: str  # never used before
    model: str  # key of the model, opaque to the bridge
    node: str
    options: bytes  # JSON of `WorkerOptions`; the path of the model is that of the server
    gpus: int = 0
    cpus: int = 0  # 0: as many as the node has, shared with other replicas
    pool: str = ""
    cache_bytes: int = 0  # of model files that the node may keep; 0: no limit
    started_at: float = 0.0  # Unix time of the server
    name: str = ""  # the model's id, for logs
    heartbeat_timeout: float = 0.0  # see `WatchdogLimits`
    step_timeout: float = 0.0
    version: str = ""  # of the server


class RetireReplica(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a replica. Its requests finish within `grace` seconds or are moved by the API servers."""

    id: str
    grace: float = 0.0


class KillReplica(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a replica at once, also one whose host does not respond."""

    id: str


class ReleaseNode(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A node is about to leave: nothing may be placed on it any more. Its replicas are retired one by one before."""

    node: str
    grace: float = 0.0


# From the bridge


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """A replica as its host describes it; where the host is lost, as the bridge knew it last."""

    id: str
    model: str
    node: str
    phase: ReplicaPhase
    address: str = ""  # "tcp:HOST:PORT", of one that is ready, hanging or draining
    fingerprint: str = ""  # replicas with the same one give the same outputs, bit by bit
    info: ModelInfo | None = None  # once it is loaded
    stats: EngineStats | None = None  # while it is loaded
    reason: str = ""  # why it waits, hangs or has ended; while fetching, the progress
    grace: float = 0.0  # of a draining one: the seconds that its requests had when draining began
    failed: bool = False  # it has ended, and was not asked to: it could not start, died, or was lost with its node
    crashed: bool = False  # it has died or was killed because it hung, after it had become ready
    retryable: bool = True  # of a failed one: another start may succeed without intervention
    suspects: list[bytes] = []  # of a crashed one: fingerprints of the requests that it computed
    hangs: int = 0  # times that it did not respond
    gpus: int = 0  # those of `LaunchReplica`, as are the following
    cpus: int = 0
    pool: str = ""
    started_at: float = 0.0
    name: str = ""
    version: str = ""
    loading: LoadProgress | None = None  # of one that is loading


class FleetReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All nodes and replicas of the cluster. While it cannot be reached, the lists are empty and say nothing."""

    nodes: list[Node] = []
    replicas: list[ReplicaReport] = []
    connected: bool = True
    reason: str = ""  # why the cluster cannot be reached, in words for an operator


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a replica has to do."""

    id: str
    running: int = 0
    waiting: int = 0  # for capacity
    idle_seconds: float = 0.0  # when the message was sent


class FleetUpdate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What has changed since the last message. While a replica is idle, the time for which it is does not count."""

    nodes: list[Node] = []  # that are new or have changed
    gone_nodes: list[str] = []
    replicas: list[ReplicaReport] = []  # that are new, or of which more than the statistics has changed
    gone_replicas: list[str] = []
    loads: list[ReplicaLoad] = []  # of others


ToBridge = LaunchReplica | RetireReplica | KillReplica | ReleaseNode
FromBridge = FleetReport | FleetUpdate


def load_of(report: ReplicaReport) -> ReplicaLoad:
    stats = report.stats or NO_STATS
    return ReplicaLoad(report.id, stats.running, stats.waiting - stats.preparing, stats.idle_seconds)


def changes(before: FleetReport, after: FleetReport) -> FleetUpdate:
    """Return what has changed between two reports on a cluster that can be reached."""
    old_nodes = {node.name: node for node in before.nodes}
    old_replicas = {replica.id: replica for replica in before.replicas}
    replicas: list[ReplicaReport] = []
    loads: list[ReplicaLoad] = []
    for replica in after.replicas:
        old = old_replicas.pop(replica.id, None)
        if old is replica:
            continue
        if old is None or msgspec.structs.replace(old, stats=replica.stats) != replica:
            replicas.append(replica)
            continue
        was, load = load_of(old), load_of(replica)
        same = (was.running, was.waiting) == (load.running, load.waiting)
        if not same or load.idle_seconds < was.idle_seconds or (load.idle_seconds > 0) != (was.idle_seconds > 0):
            loads.append(load)
    nodes = [node for node in after.nodes if old_nodes.pop(node.name, None) != node]
    return FleetUpdate(nodes, list(old_nodes), replicas, list(old_replicas), loads)


def initial_report(launch: LaunchReplica, reason: str = "") -> ReplicaReport:
    """Return the report of a replica that is still to be placed on its node."""
    return ReplicaReport(
        launch.id,
        launch.model,
        launch.node,
        "queued",
        reason=reason,
        gpus=launch.gpus,
        cpus=launch.cpus,
        pool=launch.pool,
        started_at=launch.started_at,
        name=launch.name,
        version=launch.version,
    )
