"""Pools of nodes: which nodes belong to one, how much of them may be used, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from syringa.fleet.provider import Node
from syringa.fleet.schedule import PoolSchedule

DEFAULT_POOL = "default"  # of nodes that name none
POOL_LABEL = "pool"

_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]
_Size = Annotated[float, Meta(ge=0)]
_Percent = Annotated[float, Meta(ge=0, le=100)]


class PoolCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a pool may be used."""

    max_gpus: Annotated[_Count, Meta(description="Maximum number of GPUs in use; 0: all of them.")] = 0
    max_utilization_pct: Annotated[
        _Percent,
        Meta(description="Maximum percentage of its GPUs in use, rounded down; of nodes without GPUs: of CPU threads."),
    ] = 100.0


class IdleThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """When a node of a pool in `idle` mode is idle: what its owner's processes use, at most."""

    gpu_utilization_pct: Annotated[_Percent, Meta(description="Utilization of the busiest GPU.")] = 5.0
    gpu_memory_gb: Annotated[_Size, Meta(description="Memory of all GPUs, in GiB.")] = 1.0
    cpu_pct: Annotated[_Percent, Meta(description="CPU load in percent of all threads, on a node without GPUs.")] = 20.0
    after: Annotated[
        _Seconds, Meta(description="Seconds for which that must last. Above a threshold it is reclaimed at once.")
    ] = 300.0


class PoolPreemption(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas leave a pool, and which ones."""

    grace_period: Annotated[
        _Seconds, Meta(description="Seconds in which requests may finish before they move, when a replica must leave.")
    ] = 30.0
    priority: Annotated[
        int,
        Meta(
            description="Models that name no pools use those with a higher priority first. Where another model needs"
            " the place, replicas leave those with a lower priority first."
        ),
    ] = 0


class PoolCache(msgspec.Struct, frozen=True, kw_only=True):
    """The model files that a node keeps on disk."""

    capacity: Annotated[
        _Size, Meta(description="Maximum size in GiB; the models that were not used for longest go. 0: no limit.")
    ] = 0.0


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: an entry of `[[pools]]`."""

    name: Annotated[str, Meta(description="Name of the pool.")]
    selector: Annotated[
        dict[str, str],
        Meta(description="Labels that its nodes have; default: `pool` with its name, as of `join --pool NAME`."),
    ] = {}
    capacity: PoolCapacity = PoolCapacity()
    schedule: PoolSchedule = PoolSchedule()
    idle: IdleThresholds = IdleThresholds()
    preemption: PoolPreemption = PoolPreemption()
    cache: PoolCache = PoolCache()


@dataclass(frozen=True)
class PoolTarget:
    """A pool, and what an operator wants of it."""

    spec: PoolSpec
    override: bool | None = None  # True: opened, False: closed, whatever the schedule says; None: by its schedule


def with_default(pools: Sequence[PoolTarget]) -> list[PoolTarget]:
    """Return the pools, with an always open one for nodes that name none, unless it is among them."""
    if any(pool.spec.name == DEFAULT_POOL for pool in pools):
        return list(pools)
    return [*pools, PoolTarget(PoolSpec(name=DEFAULT_POOL))]


def selects(spec: PoolSpec, labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels belongs to a pool."""
    if not spec.selector:
        return labels.get(POOL_LABEL, DEFAULT_POOL) == spec.name
    return all(labels.get(key) == value for key, value in spec.selector.items())


def pool_names(pools: Sequence[PoolTarget], nodes: Sequence[Node]) -> dict[str, str]:
    """Return the name of the first pool to which each node belongs, by the name of the node."""
    pools = with_default(pools)
    if not any(pool.spec.selector for pool in pools):
        known = {pool.spec.name for pool in pools}
        named = {node.name: node.labels.get(POOL_LABEL, DEFAULT_POOL) for node in nodes}
        return {node: pool for node, pool in named.items() if pool in known}
    found = {}
    for node in nodes:
        for pool in pools:
            if selects(pool.spec, node.labels):
                found[node.name] = pool.spec.name
                break
    return found


@dataclass(frozen=True)
class NodeIndex:
    """The nodes of a fleet by name and by pool."""

    by_name: Mapping[str, Node]
    pool_of: Mapping[str, str]  # the names of pools by those of their nodes; a node that belongs to none is not there
    members: Mapping[str, Sequence[Node]]  # by name of the pool
    ready: Mapping[str, frozenset[str]]  # the names of nodes that are ready, by name of the pool


def index_nodes(pools: Sequence[PoolTarget], nodes: Sequence[Node]) -> NodeIndex:
    pool_of = pool_names(pools, nodes)
    members: dict[str, list[Node]] = {}
    for node in nodes:
        if (pool := pool_of.get(node.name)) is not None:
            members.setdefault(pool, []).append(node)
    ready = {
        pool: frozenset(node.name for node in found if node.condition == "ready") for pool, found in members.items()
    }
    return NodeIndex({node.name: node for node in nodes}, pool_of, members, ready)


def owner_activity(thresholds: IdleThresholds, node: Node) -> str:
    """Return what the owner of a node does with it, in words; empty if it is idle.

    The words do not change with every measurement: they are part of a report that is sent when it changes.
    """
    load = node.owner_load
    if load is None:
        return "the load of its owner is not measured"
    if not node.gpus:
        high = load.cpu_pct > thresholds.cpu_pct
        return f"its owner uses more than {thresholds.cpu_pct:g} % of the CPU" if high else ""
    if load.gpu_utilization_pct > thresholds.gpu_utilization_pct:
        return f"its owner uses more than {thresholds.gpu_utilization_pct:g} % of a GPU"
    high = load.gpu_memory_bytes > thresholds.gpu_memory_gb * 2**30
    return f"its owner uses more than {thresholds.gpu_memory_gb:g} GiB of GPU memory" if high else ""
