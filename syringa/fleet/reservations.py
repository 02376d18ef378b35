"""Room that is not free yet: what replicas that leave will free, and for which model it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syringa.fleet.occupancy import Occupancy
from syringa.fleet.placement import NodeRoom, PoolRoom, ReplicaNeeds
from syringa.fleet.provider import Replica


class Reservations:
    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._leaving: dict[str, dict[str, list[Replica]]] = {}  # by pool and node

    def note_leaving(self, replica: Replica) -> None:
        """A replica leaves: it makes room, unless its node is not offered any more."""
        pool = self._occupancy.pool(replica.node)
        if pool is not None and replica.node in self._occupancy.offered:
            self._leaving.setdefault(pool.spec.name, {}).setdefault(replica.node, []).append(replica)

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
        for pool in pools:
            room = self._best_room(pool, needs) if pool.is_limited else None
            if room is not None and (group := self._meet_limits(pool, room, needs, [], spare, counts)):
                return group, room
        groups: dict[str, list[Replica]] = {}
        for victim in spare:
            home, node = self._occupancy.pool(victim.node), self._occupancy.node(victim.node)
            if home is None or node is None or home not in pools:
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
                return group, room
        return None

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
        for each in spare:
            if not self._exceeds_limits(pool, room, needs, group):
                return group
            frees = self._occupancy.gpus(each) if needs.gpus_on(room.node) else self._occupancy.threads(each)
            if not frees or each.id in chosen or self._occupancy.pool(each.node) is not pool:
                continue
            if _count(group, each.model) < counts[each.model]:
                group.append(each)
        return [] if self._exceeds_limits(pool, room, needs, group) else group

    def _exceeds_limits(self, pool: PoolRoom, room: NodeRoom, needs: ReplicaNeeds, victims: Sequence[Replica]) -> bool:
        """Return whether a pool would exceed its limits with one more replica, without those that leave."""
        if not pool.is_limited:
            return False
        leaving = [each for found in self._leaving.get(pool.spec.name, {}).values() for each in found]
        gpus, threads = needs.gpus_on(room.node), room.new_threads(needs)
        gpu_limit, cpu_limit = pool.limits
        for each in (*leaving, *victims):
            gpus -= self._occupancy.gpus(each)
            threads -= self._occupancy.threads(each)
        if needs.gpus_on(room.node):
            return pool.used_gpus + gpus > gpu_limit
        return not room.node.gpus and pool.used_cpus + threads > cpu_limit

    def _best_room(self, pool: PoolRoom, needs: ReplicaNeeds) -> NodeRoom | None:
        """Return the node on which a replica fits when those that leave have ended; of several, the fullest then."""
        names = dict.fromkeys(self._leaving.get(pool.spec.name, {}))
        if pool.is_limited:  # its limits may be all that keeps a replica from a node
            names |= dict.fromkeys(pool.nodes or {})
        best: NodeRoom | None = None
        for name in names:
            node = self._occupancy.node(name)
            if node is None:
                continue
            room = self._occupancy.room(node)
            if self._fits_without(pool, room, (), needs) and (best is None or self._left(room) < self._left(best)):
                best = room
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
