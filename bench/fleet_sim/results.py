"""The figures of a simulation, and which of them miss their targets; defined in docs/development/fleet-scale.md."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.fleet_sim.rejections import OTHER
from bench.fleet_sim.scenario import MINUTE
from bench.fleet_sim.simulation import FleetSimulation

MIN_SHARE = 0.9  # of the smaller one of offered and demanded GPU-seconds
MAX_TICK = 0.005  # seconds of CPU time of a reconcile
MAX_MINUTES = 20.0
Floats = NDArray[np.float64]


class PhaseResult(msgspec.Struct, kw_only=True):
    """The requests that came in a part of the simulation. Times in seconds."""

    name: str
    hours: float
    completed: int
    rejected: int
    queue: tuple[float, float]  # median and 99th percentile, also of the following
    first_token: tuple[float, float]
    cached_share: float  # of the prompt tokens that a single replica with endless memory would have cached
    turns_found: float  # share of the turns of chats that went to a replica that had the chat cached
    offered: float  # mean GPUs
    demanded: float
    spent: float  # see `minute_shares`
    repeated: float  # on prompt tokens that had been computed before
    held: float
    busy: float
    share: float  # spent over the smaller one of offered and demanded
    minutes: int
    minutes_below: int  # in which that was below the target


class SimulationResult(msgspec.Struct, kw_only=True):
    seed: int
    digest: str  # of what became of each request: equal for equal seeds
    nodes: int
    requests: int
    completed: int
    lost: int
    rejected: dict[str, int]  # by why they waited
    moves: dict[str, int]
    pauses: dict[str, tuple[float, float]]  # of streams, by reason of the move: median and 99th percentile
    recoveries: dict[str, tuple[float, float]]
    faults: dict[str, int]
    evictions: dict[str, int]
    starts: int
    most_replicas: int
    load_seconds: tuple[float, float]
    fetched_terabytes: float
    most_fetches: int
    link_minutes: float  # in which the server's network was the limit
    share: float
    phases: list[PhaseResult]
    tick: tuple[float, float, float]  # CPU seconds of a reconcile: median, 99th percentile, largest
    peak_tick: tuple[float, float]  # in the peak: median and 99th percentile
    route: tuple[float, float]  # CPU seconds of the router for a request of the peak: median and 99th percentile
    cpu_minutes: float = 0.0
    wall_minutes: float = 0.0

    def failures(self, *, timing: bool = True) -> list[str]:
        """Return the targets that were missed, in words."""
        found = []
        if self.lost:
            found.append(f"{self.lost} requests were lost")
        if self.rejected.get(OTHER, 0):
            found.append(f"{self.rejected[OTHER]} requests got 503 for no reason that is known")
        if self.share < MIN_SHARE:
            found.append(f"{self.share:.3f} of the GPU-seconds, not {MIN_SHARE}")
        if timing and self.tick[1] > MAX_TICK:
            found.append(f"a reconcile takes {1000 * self.tick[1]:.1f} ms, not {1000 * MAX_TICK:.0f}")
        if timing and self.wall_minutes > MAX_MINUTES:
            found.append(f"the run took {self.wall_minutes:.1f} minutes, not {MAX_MINUTES:.0f}")
        return found


def minute_shares(simulation: FleetSimulation) -> tuple[Floats, Floats, Floats]:
    """Return for each minute the GPU-seconds spent on requests, those demanded, and those offered."""
    served, rejected = simulation.served, simulation.rejected
    minutes = int(simulation.scenario.end // MINUTE)
    demanded = np.cumsum(simulation.workload.demanded, axis=1)[:, :minutes]
    before = np.concatenate([np.zeros((len(served), 1)), served[:, : minutes - 1]], axis=1)
    spent: Floats = (served[:, :minutes] - before).sum(axis=0)
    left: Floats = np.maximum(demanded - before - rejected[:, :minutes], 0.0).sum(axis=0)
    return spent, left, simulation.offered[:minutes]


def summarize(simulation: FleetSimulation, seed: int) -> SimulationResult:
    scenario, collector, fleet = simulation.scenario, simulation.collector, simulation.fleet
    spent, demanded, offered = minute_shares(simulation)
    bound = np.minimum(demanded, offered)
    used = np.minimum(spent, bound)
    ticks = np.array(simulation.tick_seconds)
    edges = {
        "day": (0.0, scenario.day_seconds),
        "ramp": (scenario.day_seconds, scenario.peak_at),
        "peak": (scenario.peak_at, scenario.requests_end),
    }
    busy, repeated = np.diff(simulation.busy, prepend=0.0), np.diff(simulation.repeated, prepend=0.0)
    phases = []
    for name, times in collector.phases.items():
        begin, end = (int(edge // MINUTE) for edge in edges[name])
        part = slice(begin, end)
        share = np.divide(used[part], bound[part], out=np.ones(end - begin), where=bound[part] > 1.0)
        seconds = (end - begin) * MINUTE
        phases.append(
            PhaseResult(
                name=name,
                hours=(end - begin) / 60,
                completed=times.completed,
                rejected=times.rejected,
                queue=_percentiles(times.queue),
                first_token=_percentiles(times.first_token),
                cached_share=_share(times.cached_tokens, times.cacheable_tokens),
                turns_found=_share(times.turns_found, times.turns),
                offered=float(offered[part].sum() / seconds),
                demanded=float(simulation.workload.demanded[:, part].sum() / seconds),
                spent=float(spent[part].sum() / seconds),
                held=float(simulation.held[part].sum() / seconds),
                busy=float(busy[part].sum() / seconds),
                repeated=float(repeated[part].sum() / seconds),
                share=float(used[part].sum() / max(bound[part].sum(), 1e-9)),
                minutes=end - begin,
                minutes_below=int((share < MIN_SHARE).sum()),
            )
        )
    peak = ticks[int(scenario.peak_at) : int(scenario.requests_end)]
    return SimulationResult(
        seed=seed,
        digest=collector.digest,
        nodes=len(fleet.nodes_by_name),
        requests=collector.arrived,
        completed=collector.completed_count,
        lost=len(collector.losses),
        rejected=dict(simulation.rejections.counts),
        moves=dict(sorted(collector.moves.items())),
        pauses={reason: _percentiles(times) for reason, times in sorted(collector.pauses.items())},
        recoveries={reason: _percentiles(times) for reason, times in sorted(collector.recoveries.items())},
        faults=dict(simulation.faults.counts),
        evictions=simulation.controller.status().evictions,
        starts=fleet.starts,
        most_replicas=simulation.most_replicas,
        load_seconds=_percentiles(array("d", fleet.load_times)),
        fetched_terabytes=fleet.fetched_bytes / 1e12,
        most_fetches=fleet.link.most_fetches,
        link_minutes=fleet.link.busy_seconds / MINUTE,
        share=float(used.sum() / bound.sum()),
        phases=phases,
        tick=(float(np.median(ticks)), float(np.percentile(ticks, 99)), float(ticks.max())),
        route=_percentiles(collector.route_times),
        peak_tick=(float(np.median(peak)), float(np.percentile(peak, 99))),
    )


def _percentiles(times: array[float]) -> tuple[float, float]:
    if not times:
        return 0.0, 0.0
    middle, high = np.percentile(np.frombuffer(times), [50, 99])
    return float(middle), float(high)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def outcome(result: SimulationResult) -> dict[str, Any]:
    """Return what depends on the seed alone, without times of this machine."""
    known: dict[str, Any] = msgspec.to_builtins(result)
    for name in ("tick", "peak_tick", "route", "cpu_minutes", "wall_minutes"):
        del known[name]
    return known
