"""The simulation: the real controller once a second, the real router for each request, and the clock of both."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from bench.fleet_sim.collector import Collector
from bench.fleet_sim.engine import ModelClients
from bench.fleet_sim.event_loop import EventLoop
from bench.fleet_sim.faults import Faults
from bench.fleet_sim.fleet import SimulatedFleet, SimulatedNode
from bench.fleet_sim.rejections import RejectionLog
from bench.fleet_sim.scenario import MINUTE, Scenario, SimulatedPool
from bench.fleet_sim.streams import Arrivals, Workload
from syringa.fleet.controller import Controller
from syringa.fleet.decisions import ModelTarget
from syringa.fleet.pools import PoolSpec
from syringa.fleet.provider import Node, Replica, ReplicaEvent
from syringa.fleet.schedule import PoolSchedule, PoolWindow, is_open

T = TypeVar("T")
TICK_SECONDS = 1.0
MAX_REPLICAS = 1000  # of a model


class TimedProvider:
    """The fleet as the controller sees it. The time spent in here is not the controller's."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet, self.seconds = fleet, 0.0
        self.started: Counter[str] = Counter()

    def nodes(self) -> Sequence[Node]:
        return self._timed(self._fleet.nodes)

    def replicas(self) -> Sequence[Replica]:
        return self._timed(self._fleet.replicas)

    def events(self) -> Sequence[ReplicaEvent]:
        return self._timed(self._fleet.events)

    def start(self, model: str, node: str) -> str:
        began = time.thread_time()
        id = self._fleet.start(model, node)
        self.seconds += time.thread_time() - began
        return id

    def stop(self, replica: str, grace: float) -> None:
        began = time.thread_time()
        self._fleet.stop(replica, grace)
        self.seconds += time.thread_time() - began

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.thread_time()
        result = call()
        self.seconds += time.thread_time() - began
        return result


def pool_spec(pool: SimulatedPool) -> PoolSpec:
    windows = (PoolWindow(start=pool.start, end=pool.end),) if pool.start else ()
    schedule = PoolSchedule(mode=pool.mode, timezone=pool.timezone, windows=windows)  # type: ignore[arg-type]
    return PoolSpec(name=pool.name, schedule=schedule)


class FleetSimulation:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.loop, self.collector = scenario, EventLoop(), Collector(scenario)
        self.workload = Workload(scenario, seed)
        self.clients = [
            ModelClients(model, scenario, self.loop, self.collector, self.workload.ended, self._drained)
            for model in scenario.models
        ]
        self.fleet = SimulatedFleet(scenario, self.loop, self.clients, seed)
        self.faults = Faults(scenario, self.fleet, self.loop, seed)
        self.provider = TimedProvider(self.fleet)
        self.specs = [pool_spec(pool) for pool in scenario.pools]
        targets = [
            ModelTarget(model.name, model.name, model.min_replicas, MAX_REPLICAS, pools=model.pools, gpus=model.gpus)
            for model in scenario.models
        ]
        self.controller = Controller(
            self.provider,
            lambda: targets,
            lambda: self.loop.now,
            pools=self.specs,
            wall=lambda: self.scenario.start + self.loop.now,
        )
        self.tick_seconds = array("d")  # CPU time of the controller, without its provider
        minutes = self.workload.minutes
        self.offered = np.zeros(minutes)  # GPU-seconds
        self.held = np.zeros(minutes)  # GPU-seconds of replicas, from the decision to start them on
        self.busy = np.zeros(minutes)  # GPU-seconds of replicas with requests, since the start, as are the following
        self.repeated = np.zeros(minutes)  # for prompts that had been computed before
        self.served = np.zeros((len(scenario.models), minutes))
        self.rejected = np.zeros((len(scenario.models), minutes))
        self.most_replicas = 0
        self.rejections = RejectionLog(self.clients)
        self._open: dict[str, bool] = {}
        self._gpus = 0
        self._arrivals: Iterator[Arrivals] = self.workload.arrivals()
        self._burst: Arrivals | None = None
        self._position = 0

    def run(self, progress: Callable[[float], None] = lambda at: None) -> None:
        self._next_burst()
        at = 0.0
        while at < self.scenario.end:
            self._tick()
            at += TICK_SECONDS
            self.loop.run(at)
            if at % MINUTE == 0:
                self._end_minute(int(at // MINUTE) - 1)
                progress(at)
        self._check_ended()

    # Requests

    def _next_burst(self) -> None:
        for burst in self._arrivals:
            if burst.times:
                self._burst, self._position = burst, 0
                self.loop.at(burst.times[0], self._arrive)
                return

    def _arrive(self, _: object) -> None:
        burst, position = self._burst, self._position
        assert burst is not None
        stream = self.workload.request(burst, position)
        self._position = position + 1
        if self._position < len(burst.times):
            self.loop.at(burst.times[self._position], self._arrive)
        else:
            self._next_burst()
        self.collector.arrived += 1
        self.clients[stream.model].submit(stream)

    def _drained(self, replica: object) -> None:
        self.fleet.end(replica, "drain")  # type: ignore[arg-type]

    def _check_ended(self) -> None:
        """Whatever has neither completed nor got 503 is lost."""
        for _ in range(2):  # those of the last second, and those that it leaves for the next one
            self._explain_rejections()
        for clients in self.clients:
            for stream in clients.pending:
                self.collector.lost(stream, "still waits for a replica at the end")
        for replica in self.fleet.running.values():
            for stream in replica.streams():
                self.collector.lost(stream, f"still at {replica.id} at the end")
        missing = self.collector.arrived - self.collector.completed_count - self.collector.rejections.total()
        if missing != len(self.collector.losses):
            raise AssertionError(f"{missing} requests are missing, {len(self.collector.losses)} are known to be lost")

    # Once a second

    def _tick(self) -> None:
        began, inside = time.thread_time(), self.provider.seconds
        self.controller.tick()
        self.tick_seconds.append(time.thread_time() - began - (self.provider.seconds - inside))
        for clients in self.clients:
            clients.expire()
        minute = int(self.loop.now // MINUTE)
        self.offered[minute] += self._offered_gpus() * TICK_SECONDS
        held = sum(replica.model.gpus for replica in self.fleet.running.values())
        self.held[minute] += held * TICK_SECONDS
        self.most_replicas = max(self.most_replicas, len(self.fleet.running))
        self._explain_rejections()

    def _offered_gpus(self) -> int:
        """Return the GPUs of nodes that run and are offered by their pools, whatever the controller knows of it."""
        if self.loop.now % 15 == 0:
            wall = self.scenario.start + self.loop.now
            self._open = {spec.name: is_open(spec.schedule, wall) for spec in self.specs}
            self.fleet.offers_changed = True
        if self.fleet.offers_changed:
            self.fleet.offers_changed = False
            self._gpus = sum(each.view.gpus for each in self.fleet.nodes_by_name.values() if self._is_offered(each))
        return self._gpus

    def _is_offered(self, node: SimulatedNode) -> bool:
        return node.alive and node.view.condition == "ready" and self._open[node.pool.name] and node.owner_away

    def _explain_rejections(self) -> None:
        rejected, nodes = self.collector.take_rejections(), self.fleet.nodes_by_name.values()
        offered = (node for node in nodes if self._is_offered(node))
        self.rejections.update(self.loop.now, rejected, offered, self.fleet.running.values())

    # Once a minute

    def _end_minute(self, minute: int) -> None:
        for replica in self.fleet.running.values():
            replica.advance()
        for index, clients in enumerate(self.clients):
            model, work = clients.model, clients.work
            self.served[index, minute] = (
                work.output_tokens * model.gpu_seconds_per_token
                + work.prompt_tokens * model.gpu_seconds_per_prompt_token
            )
            self.busy[minute] += work.busy_seconds * model.gpus
            self.repeated[minute] += work.repeated_tokens * model.gpu_seconds_per_prompt_token
            self.rejected[index, minute] = self.collector.rejected_work[index]
