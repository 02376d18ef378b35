"""What operators see of nodes and pools: a report of the controller, sent to the API servers when it changes."""

from __future__ import annotations

import bisect
from typing import Literal

import msgspec

from syringa.fleet.provider import NodeCondition
from syringa.types import HistogramCounts

PoolState = Literal["active", "closing", "inactive", "degraded"]
"""closing: it is not open, and replicas are left; degraded: it is open, and a node is lost or too few are there."""


RECOVERY_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class NodeStatus(msgspec.Struct, frozen=True, array_like=True):
    """A node as operators see it."""

    name: str
    state: NodeCondition
    pool: str = ""  # empty: it matches none, and is not used
    offered: bool = True  # whether replicas may be started on it now
    reason: str = ""  # why it is not offered
    gpus: int = 0
    cpus: int = 0
    memory: int = 0  # bytes; 0: unknown
    replicas: int = 0
    labels: dict[str, str] = {}


class PoolStatus(msgspec.Struct, frozen=True, array_like=True):
    """A pool as operators see it."""

    name: str
    state: PoolState
    mode: Literal["always", "scheduled", "idle"] = "always"
    override: bool | None = None  # True: opened, False: closed by an operator; None: it follows its schedule
    reason: str = ""  # why it has this state
    nodes: int = 0  # those that are not lost
    offered: int = 0  # of these, those on which replicas may be started now
    gpus: int = 0  # of all its nodes
    gpus_used: int = 0
    cpus: int = 0  # threads of its nodes without GPUs
    cpus_used: int = 0
    replicas: int = 0
    changes_at: float | None = None  # Unix time at which its schedule opens or closes it; None: never


class FleetMove(msgspec.Struct, frozen=True, array_like=True):
    """A replica that the controller has started or stopped, and why."""

    at: float  # Unix time
    action: Literal["start", "stop"]
    replica: str
    model: str = ""  # its name; empty: unknown
    node: str = ""  # empty: unknown
    reason: str = ""


class FleetStatus(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The nodes and pools of a server, and what its controller has counted since the server was started."""

    nodes: list[NodeStatus] = []
    pools: list[PoolStatus] = []
    evictions: dict[str, int] = {}  # replicas that had to leave their place, by cause
    recovery: HistogramCounts = HistogramCounts()  # seconds from the loss of a replica until the minimum was ready
    moves: list[FleetMove] = []  # the newest first, a limited number


class RecoveryTimes:
    """A histogram of seconds from the loss of a replica until the minimum of its model was ready again."""

    def __init__(self) -> None:
        self._counts = [0] * (len(RECOVERY_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(RECOVERY_BOUNDS, seconds)] += 1
        self._sum += seconds

    def counts(self) -> HistogramCounts:
        return HistogramCounts(RECOVERY_BOUNDS, tuple(self._counts), self._sum)
