"""What happens to nodes: losses without notice, announced reclaims, flapping, and owners that need their machines."""

from __future__ import annotations

import random
from collections import Counter

from bench.fleet_sim.event_loop import EventLoop
from bench.fleet_sim.fleet import OWNER_LOAD, SimulatedFleet, SimulatedNode
from bench.fleet_sim.scenario import Scenario
from syringa.fleet.pools import IdleThresholds
from syringa.fleet.provider import OwnerLoad

GRACES = (10.0, 30.0, 120.0)  # seconds that a reclaimed node grants
FLAPS = 10  # losses of a flapping node
FLAP_AWAY, FLAP_BACK = 20.0, 60.0  # mean seconds


class Faults:
    def __init__(self, scenario: Scenario, fleet: SimulatedFleet, loop: EventLoop, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._scenario, self._fleet, self._loop = scenario, fleet, loop
        self._random = random.Random(seed + 2)
        self._nodes = list(fleet.nodes_by_name.values())
        self._owned = [node for node in self._nodes if node.pool.mode == "idle"]
        self._schedule("loss", scenario.loss_seconds)
        self._schedule("drain", scenario.drain_seconds)
        self._schedule("flap", scenario.flap_seconds)
        loop.at(scenario.peak_at + scenario.peak_seconds / 4, self._lose_rack)
        for node in self._owned:
            loop.at(self._random.uniform(0, scenario.owner_away_seconds), self._owner_comes, node)

    def _schedule(self, kind: str, mean_seconds: float) -> None:
        self._loop.after(self._random.expovariate(len(self._nodes) / mean_seconds), self._strike, (kind, mean_seconds))

    def _strike(self, fault: tuple[str, float]) -> None:
        kind, mean_seconds = fault
        node = self._random.choice(self._nodes)
        if node.alive and node.view.condition == "ready":
            self.counts[kind] += 1
            if kind == "loss":
                self._lose(node, self._random.expovariate(1 / self._scenario.away_seconds))
            elif kind == "drain":
                self._drain(node)
            else:
                self._flap((node, FLAPS))
        self._schedule(kind, mean_seconds)

    def _lose(self, node: SimulatedNode, away: float) -> None:
        self._fleet.lose(node)
        self._loop.after(away, self._join, node)

    def _lose_rack(self, _: object) -> None:
        nodes = [node for node in self._nodes if node.alive and node.pool.mode == "always" and node.replicas]
        self.counts["rack"] += 1
        for node in nodes[-self._scenario.rack_nodes :]:
            self._lose(node, self._random.expovariate(1 / self._scenario.away_seconds))

    def _drain(self, node: SimulatedNode) -> None:
        grace = self._random.choice(GRACES)
        self._fleet.set_view(node, condition="draining", drain_grace=grace)
        self._loop.after(grace + 2.0, self._leave, (node, node.changes))

    def _leave(self, drained: tuple[SimulatedNode, int]) -> None:
        node, changes = drained
        if node.changes == changes:
            self._fleet.leave(node)
            self._loop.after(self._random.expovariate(1 / self._scenario.away_seconds), self._join, node)

    def _flap(self, flapping: tuple[SimulatedNode, int]) -> None:
        node, left = flapping
        if not node.alive or node.view.condition != "ready":
            return
        away = self._random.expovariate(1 / FLAP_AWAY)
        self._lose(node, away)
        if left > 1:
            self._loop.after(away + self._random.expovariate(1 / FLAP_BACK), self._flap, (node, left - 1))

    def _join(self, node: SimulatedNode) -> None:
        """A node is back; one of an idle pool is offered when its owner has left it alone for long enough."""
        self._fleet.join(node)
        if node.pool.mode == "idle" and node.view.owner_load != OWNER_LOAD:
            node.owner_away = False
            self._await_idle(node)

    def _await_idle(self, node: SimulatedNode) -> None:
        node.owner_left_at = self._loop.now
        self._loop.after(IdleThresholds().after, self._offer, (node, self._loop.now))

    def _owner_comes(self, node: SimulatedNode) -> None:
        self.counts["owner"] += 1
        node.owner_away, node.owner_left_at = False, None
        self._fleet.set_view(node, owner_load=OWNER_LOAD)
        self._loop.after(self._random.expovariate(1 / self._scenario.owner_active_seconds), self._owner_leaves, node)

    def _owner_leaves(self, node: SimulatedNode) -> None:
        self._fleet.set_view(node, owner_load=OwnerLoad())
        self._await_idle(node)
        self._loop.after(self._random.expovariate(1 / self._scenario.owner_away_seconds), self._owner_comes, node)

    def _offer(self, left: tuple[SimulatedNode, float]) -> None:
        """The owner of a node has left it alone for long enough."""
        node, left_at = left
        if node.owner_left_at == left_at:
            node.owner_away = self._fleet.offers_changed = True
