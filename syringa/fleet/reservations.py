"""Room that is not free yet: what replicas that leave will free, and for which model it is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from syringa.fleet.occupancy import Occupancy
from syringa.fleet.placement import NodeRoom, PoolRoom, ReplicaNeeds
from syringa.fleet.provider import Replica


class Reservations:
    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._leaving: dict[str, dict[str, list[Replica]]] = {}  # by pool and node
        self._leaving_gpus: dict[str, int] = {}  # by pool
        self._leaving_threads: dict[str, int] = {}  # by pool, until another one leaves

    def note_leaving(self, replica: Replica) -> None:
        """A replica leaves: it makes room in its pool and, where that is offered, on its node."""
        pool = self._occupancy.pool(replica.node)
        if pool is not None and self._occupancy.node(replica.node) is not None:
            name = pool.spec.name
            self._leaving.setdefault(name, {}).setdefault(replica.node, []).append(replica)
            self._leaving_threads.pop(name, None)
            self._leaving_gpus[name] = self._leaving_gpus.get(name, 0) + self._occupancy.gpus(replica)

    def reserve_leaving(self, model: str, needs: ReplicaNeeds, pools: Sequence[PoolRoom]) -> bool:
        """Keep for a model the room that replicas leave anyway. Return whether there is enough of it."""
        for pool in pools:
            room = self._best_room(pool, needs)
            if room is not None and not self._exceeds_limits(pool, room, needs, ()):
                self.reserve(room, model, needs)
                return True
        return False

    def reserve(self, room: NodeRoom, model: str, needs: ReplicaNeeds) -> None:
        """Keep a node's room for a model: nothing else is started there in its place."""
        gpus, threads = room.take(model, needs)
        if (pool := self._occupancy.pool(room.node.name)) is not None:
            pool.used_gpus += gpus
            pool.used_cpus += threads

    def choose_victims(
        self, needs: ReplicaNeeds, pools: Sequence[PoolRoom], spare: Sequence[Replica], counts: Mapping[str, int]
    ) -> tuple[list[Replica], NodeRoom] | None:
        """Return replicas without which there is room, and its node. The first that suffice give way.

        `spare`: replicas on offered nodes, in the order in which they may give way; `counts`: how many, by model.
        """
        order = {each.id: position for position, each in enumerate(spare)}
        found: list[tuple[int, list[Replica], NodeRoom]] = []  # with the position of the last that gives way
        hopeless: list[PoolRoom] = []  # whose limit of GPUs would be exceeded whatever gives way
        for pool in pools:
            room = self._best_room(pool, needs) if pool.is_limited else None
            if room is None:
                continue
            if group := self._meet_limits(pool, room, needs, [], spare, counts):
                found.append((max(order[each.id] for each in group), group, room))
            elif needs.gpus_on(room.node):
                hopeless.append(pool)
        groups: dict[str, list[Replica]] = {}
        for victim in spare:
            home, node = self._occupancy.pool(victim.node), self._occupancy.node(victim.node)
            if home is None or node is None or home not in pools or (node.gpus and home in hopeless):
                continue
            group = groups.setdefault(node.name, [])
            if _count(group, victim.model) >= counts[victim.model]:
                continue
            group.append(victim)
            room = self._occupancy.room(node)
            if not self._fits_without(home, room, group, needs):
                continue
            for each in group[-2::-1]:
                if self._fits_without(home, room, rest := [other for other in group if other is not each], needs):
                    group = rest
            if group := self._meet_limits(home, room, needs, group, spare, counts):
                found.append((max(order[each.id] for each in group), group, room))
                break
            if needs.gpus_on(node):
                hopeless.append(home)
        if not found:
            return None
        _, victims, room = min(found, key=lambda each: each[0])
        return victims, room

    def _meet_limits(
        self,
        pool: PoolRoom,
        room: NodeRoom,
        needs: ReplicaNeeds,
        victims: Sequence[Replica],
        spare: Sequence[Replica],
        counts: Mapping[str, int],
    ) -> list[Replica]:
        """Return the victims, with others of the pool if it would exceed its limits; [] if they do not suffice."""
        group, chosen = list(victims), {each.id for each in victims}
        if not self._exceeds_limits(pool, room, needs, group):
            return group
        for each in spare:
            frees = self._occupancy.gpus(each) if needs.gpus_on(room.node) else self._occupancy.threads(each)
            if not frees or each.id in chosen or self._occupancy.pool(each.node) is not pool:
                continue
            if _count(group, each.model) >= counts[each.model]:
                continue
            group.append(each)
            if not self._exceeds_limits(pool, room, needs, group):
                for other in reversed(group[len(victims) : -1]):  # those of the node are needed there
                    rest = [one for one in group if one is not other]
                    if not self._exceeds_limits(pool, room, needs, rest):
                        group = rest
                return group
        return []

    def _exceeds_limits(self, pool: PoolRoom, room: NodeRoom, needs: ReplicaNeeds, victims: Sequence[Replica]) -> bool:
        """Return whether a pool would exceed its limits with one more replica, without those that leave."""
        if not pool.is_limited:
            return False
        gpu_limit, cpu_limit = pool.limits
        if gpus := needs.gpus_on(room.node):
            gpus -= self._leaving_gpus.get(pool.spec.name, 0) + sum(self._occupancy.gpus(each) for each in victims)
            return pool.used_gpus + gpus > gpu_limit
        if room.node.gpus:
            return False
        leaving, freed_threads = self._leaving.get(pool.spec.name, {}), self._occupancy.freed_threads
        freed = self._leaving_threads.get(pool.spec.name)
        if freed is None:
            freed = sum(freed_threads(name, found) for name, found in leaving.items())
            self._leaving_threads[pool.spec.name] = freed
        for name in {each.node for each in victims}:
            also, group = leaving.get(name, []), [each for each in victims if each.node == name]
            freed += freed_threads(name, [*also, *group]) - freed_threads(name, also)
        return pool.used_cpus + room.new_threads(needs) - freed > cpu_limit

    def _best_room(self, pool: PoolRoom, needs: ReplicaNeeds) -> NodeRoom | None:
        """Return the node on which a replica fits when those that leave have ended; of several, the fullest then."""
        names = dict.fromkeys(self._leaving.get(pool.spec.name, {}))
        if pool.is_limited:  # its limits may be all that keeps a replica from a node
            names |= dict.fromkeys(pool.nodes or {})
        best: NodeRoom | None = None
        best_key: tuple[bool, float, float] = (True, math.inf, math.inf)
        for name in names:
            node = self._occupancy.node(name)
            if node is None or name not in self._occupancy.offered:
                continue
            room = self._occupancy.room(node)
            if self._fits_without(pool, room, (), needs):
                key = self._exceeds_limits(pool, room, needs, ()), *self._left(room)
                if best is None or key < best_key:
                    best, best_key = room, key
        return best

    def _fits_without(self, pool: PoolRoom, room: NodeRoom, victims: Sequence[Replica], needs: ReplicaNeeds) -> bool:
        """Return whether a replica would fit on a node without these replicas of it, and those that leave."""
        leaving = self._leaving.get(pool.spec.name, {}).get(room.node.name, ())
        return room.fits_without([self._occupancy.needs(each) for each in (*leaving, *victims)], needs)

    def _left(self, room: NodeRoom) -> tuple[float, float]:
        """Return the GPUs and the threads that a node has when those that leave have ended."""
        pool = self._occupancy.pool(room.node.name)
        leaving = self._leaving.get(pool.spec.name if pool else "", {}).get(room.node.name, ())
        needs = [self._occupancy.needs(each) for each in leaving]
        return room.gpus + sum(each.gpus_on(room.node) for each in needs), room.cpus + sum(each.cpus for each in needs)


def _count(replicas: Sequence[Replica], model: str) -> int:
    return sum(each.model == model for each in replicas)
