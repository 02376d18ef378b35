"""The interface of what runs replicas: this machine's supervisor, or a cluster. Nothing above it knows which it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

EventKind = Literal["ready", "ended", "failed"]
NodeCondition = Literal["ready", "draining", "lost"]
ReplicaCondition = Literal["queued", "fetching", "starting", "ready", "hanging", "draining"]

LOCAL_NODE = "local"


@dataclass(frozen=True, slots=True)
class OwnerLoad:
    """What the processes of a node's owner use, all processes that are not ours."""

    gpu_utilization_pct: float = 0.0  # of the busiest GPU
    gpu_memory_bytes: int = 0  # on all GPUs
    cpu_pct: float = 0.0  # of all cores


@dataclass(frozen=True, slots=True)
class Node:
    """A place where replicas run: a machine, or in a cluster a pod."""

    name: str
    condition: NodeCondition = "ready"  # draining: it is about to be taken away
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    cpus: int = 0  # 0: unknown
    memory: int = 0  # bytes; 0: unknown
    joined_at: float = 0.0
    owner_load: OwnerLoad | None = None  # None: not measured
    drain_grace: float | None = None  # seconds that a draining node grants; None: the default

    @property
    def draining(self) -> bool:
        return self.condition == "draining"


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as a provider observes it."""

    id: str  # never used again
    model: str  # key of the model
    node: str = LOCAL_NODE
    condition: ReplicaCondition = "ready"
    running: int = 0  # sequences
    waiting: int = 0  # requests that wait for capacity
    idle_seconds: float = 0.0  # since its last request; 0 while it is in use
    started_at: float = 0.0
    address: str = ""  # "unix:PATH" or "tcp:HOST:PORT", of one that is ready
    fingerprint: str = ""
    reason: str = ""  # why it waits or hangs


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """What has happened to a replica: it has become ready, has ended as it should, or has failed."""

    kind: EventKind
    replica: str
    model: str
    reason: str = ""
    node: str = ""  # where it ran; empty: where it was observed last


class ReplicaProvider(Protocol):
    """Starts and stops replicas on nodes. No method blocks."""

    def nodes(self) -> Sequence[Node]: ...

    def replicas(self) -> Sequence[Replica]:
        """Return the replicas that have not ended."""
        ...

    def start(self, model: str, node: str) -> str:
        """Begin to start a replica, and return its id. What becomes of it is reported as events."""
        ...

    def stop(self, replica: str, grace: float) -> None:
        """End a replica: its requests finish within `grace` seconds or move to another one."""
        ...

    def events(self) -> Sequence[ReplicaEvent]:
        """Return what has happened since the last call."""
        ...
