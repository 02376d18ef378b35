"""Metrics of nodes and pools. The controller serves all API processes, so nothing is added up here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, get_args

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from syringa.fleet.provider import NodeCondition
from syringa.fleet.status import FleetStatus, PoolState, PoolStatus

POOL = "pool"

_POOL_GAUGES: dict[str, tuple[str, Callable[[PoolStatus], float]]] = {
    "pool_nodes_offered": ("Nodes of a pool on which replicas may be started now.", lambda pool: pool.offered),
    "pool_gpus": ("GPUs of the nodes of a pool.", lambda pool: pool.gpus),
    "pool_gpus_used": ("GPUs of a pool in use.", lambda pool: pool.gpus_used),
    "pool_cpus": ("CPU threads of the nodes of a pool that have no GPUs.", lambda pool: pool.cpus),
    "pool_cpus_used": ("CPU threads of a pool in use.", lambda pool: pool.cpus_used),
}


def summarize_fleet(status: FleetStatus) -> dict[str, dict[str, Any]]:
    """Return what `/status` says of nodes and pools: numbers without a name, because it is public."""
    times = status.recovery
    count = sum(times.counts)
    return {
        "nodes": dict(Counter(node.state for node in status.nodes)),
        "pools": dict(Counter(pool.state for pool in status.pools)),
        "evictions": dict(status.evictions),
        "recovery": {"count": count, "mean_seconds": round(times.sum / count, 3) if count else None},
    }


def fleet_families(prefix: str, status: FleetStatus) -> list[Metric]:
    """Return the metrics of all nodes and pools."""
    return [
        _nodes(prefix, status),
        _pools(prefix, status),
        *_pool_gauges(prefix, status),
        _evictions(prefix, status),
        _recovery(prefix, status),
    ]


def _nodes(prefix: str, status: FleetStatus) -> Metric:
    """Return the number of nodes by pool and state. A state that a pool's nodes may have is there with 0, too."""
    family = GaugeMetricFamily(f"{prefix}nodes", "Nodes by pool and state.", labels=(POOL, "state"))
    counts = Counter((node.pool, node.state) for node in status.nodes)
    for pool in sorted({node.pool for node in status.nodes} | {pool.name for pool in status.pools}):
        for state in get_args(NodeCondition):
            family.add_metric((pool, state), counts[pool, state])
    return family


def _pools(prefix: str, status: FleetStatus) -> Metric:
    family = GaugeMetricFamily(f"{prefix}pools", "1 for the state that a pool has.", labels=(POOL, "state"))
    for pool in status.pools:
        for state in get_args(PoolState):
            family.add_metric((pool.name, state), int(pool.state == state))
    return family


def _pool_gauges(prefix: str, status: FleetStatus) -> Iterable[Metric]:
    for name, (about, value) in _POOL_GAUGES.items():
        family = GaugeMetricFamily(prefix + name, about, labels=(POOL,))
        for pool in status.pools:
            family.add_metric((pool.name,), value(pool))
        yield family


def _evictions(prefix: str, status: FleetStatus) -> Metric:
    about = "Replicas that had to leave their place."
    family = CounterMetricFamily(f"{prefix}replica_evictions", about, labels=("reason",))
    for reason, count in status.evictions.items():
        family.add_metric((reason,), count)
    return family


def _recovery(prefix: str, status: FleetStatus) -> Metric:
    about = "Time from the loss of a replica until the minimum of its model was ready again."
    family = HistogramMetricFamily(f"{prefix}recovery_seconds", about)
    found = status.recovery
    bounds = [*map(floatToGoString, found.bounds), "+Inf"]
    family.add_metric((), list(zip(bounds, itertools.accumulate(found.counts), strict=True)), sum_value=found.sum)
    return family
