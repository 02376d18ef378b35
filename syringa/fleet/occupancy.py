"""Which nodes of a snapshot are offered, and what runs on them.

Most nodes of a large fleet are offered and need no further look. So what is known of a single node is found out when it
is asked for, and what runs where is sorted only where a place is looked for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from syringa.fleet.decisions import (
    NO_NODE_HISTORY,
    FleetSnapshot,
    Reclaim,
    offered_nodes,
    recent_failures,
    reclaim_reason,
)
from syringa.fleet.placement import NodeRoom, PoolRoom, ReplicaNeeds
from syringa.fleet.provider import Node, Replica

_NO_NEEDS = ReplicaNeeds()


class Occupancy:
    def __init__(
        self, snapshot: FleetSnapshot, pools: Mapping[str, PoolRoom], needs: Mapping[str, ReplicaNeeds]
    ) -> None:
        """`pools`: by name; `needs`: by key of the model."""
        self._snapshot, self._index, self._pools, self._needs = snapshot, snapshot.index, pools, needs
        self.offered = offered_nodes(snapshot, pools.values())
        self._uses_cpus = any(each.device == "cpu" for each in needs.values())
        self._reclaims: dict[str, Reclaim] = {}  # of nodes that were looked at and are not offered
        self._rooms: dict[str, NodeRoom] = {}  # of nodes that were looked at

    def node(self, name: str) -> Node | None:
        """Return a node that is not lost; None if it is, or if there is none of that name."""
        node = self._index.by_name.get(name)
        return None if node is None or node.condition == "lost" else node

    def pool(self, name: str) -> PoolRoom | None:
        """Return the pool of a node."""
        return self._pools.get(self._index.pool_of.get(name, ""))

    def reclaim(self, node: Node) -> Reclaim | None:
        """Return why nothing may be started on a node that is not lost; None if it is offered."""
        name = node.name
        if name in self.offered:
            return None
        found = self._reclaims.get(name)
        if found is None:
            history = self._snapshot.node_history.get(name, NO_NODE_HISTORY)
            found = reclaim_reason(node, self.pool(name), history, self._snapshot.now, self._snapshot.pools)
            assert found is not None
            self._reclaims[name] = found
        return found

    def needs(self, replica: Replica) -> ReplicaNeeds:
        return self._needs.get(replica.model, _NO_NEEDS)

    def gpus(self, replica: Replica) -> int:
        """Return the GPUs that a replica takes of its node, which is not lost."""
        return self.needs(replica).gpus_on(self._index.by_name[replica.node])

    def threads(self, replica: Replica) -> int:
        """Return the threads that a replica takes of its pool."""
        node = self._index.by_name[replica.node]
        return 0 if node.gpus else self.needs(replica).cpus_on(node)

    def freed_threads(self, name: str, gone: Sequence[Replica]) -> int:
        """Return the threads of its pool that a node frees without these replicas: not those that others share."""
        node = self._index.by_name[name]
        if node.gpus:
            return 0
        ids, before, after = {each.id for each in gone}, NodeRoom(node), NodeRoom(node)
        for each in self._by_node.get(name, ()):
            before.take(each.model, self.needs(each))
            if each.id not in ids:
                after.take(each.model, self.needs(each))
        return before.threads - after.threads

    def replicas_in(self, pool: PoolRoom) -> list[Replica]:
        """Return what runs on the nodes of a pool that are not lost."""
        nodes = [node for node in self._index.members.get(pool.spec.name, ()) if node.condition != "lost"]
        return [replica for node in nodes for replica in self._by_node.get(node.name, ())]

    def measure(self, pool: PoolRoom) -> None:
        """Count what a pool has, and what is in use, also on nodes that are not offered."""
        for node in self._index.members.get(pool.spec.name, ()):
            if node.condition == "lost":
                continue
            pool.total_gpus += node.gpus
            pool.total_cpus += 0 if node.gpus else node.cpus
            if node.name in self._by_node:
                room = self.room(node)
                pool.used_gpus += node.gpus - room.gpus
                pool.used_cpus += room.threads

    def room(self, node: Node) -> NodeRoom:
        """Return what a node has left."""
        room = self._rooms.get(node.name)
        if room is None:
            history = self._snapshot.node_history.get(node.name, NO_NODE_HISTORY)
            room = self._rooms[node.name] = NodeRoom(node, recent_failures(history, self._snapshot.now))
            for replica in self._by_node.get(node.name, ()):
                room.take(replica.model, self.needs(replica))
        return room

    def offered_rooms(self, pool: PoolRoom) -> dict[str, NodeRoom]:
        """Return the nodes of a pool that are offered, without those that have nothing left for any model."""
        rooms: dict[str, NodeRoom] = {}
        offered, used = self.offered, self._used_gpus
        for node in self._index.members.get(pool.spec.name, ()):
            name = node.name
            if name in offered:
                pool.offers = True
                if used.get(name, 0) < node.gpus or not node.gpus or self._uses_cpus:
                    rooms[name] = self.room(node)
        return rooms

    @functools.cached_property
    def _by_node(self) -> Mapping[str, Sequence[Replica]]:
        found: dict[str, list[Replica]] = {}
        for replica in self._snapshot.replicas:
            name = replica.node
            if name in found:
                found[name].append(replica)
            else:
                found[name] = [replica]
        return found

    @functools.cached_property
    def _used_gpus(self) -> Mapping[str, int]:
        """The GPUs that are in use on nodes that have some, by name of the node."""
        gpus = {key: needs.gpus_used for key, needs in self._needs.items()}
        unknown = _NO_NEEDS.gpus_used
        used: dict[str, int] = {}
        for replica in self._snapshot.replicas:
            name = replica.node
            used[name] = used.get(name, 0) + gpus.get(replica.model, unknown)
        return used
