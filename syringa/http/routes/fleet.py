"""Administration of nodes and pools: list them, drain a node, and open or close a pool."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.admin import (
    MoveEntry,
    MoveList,
    NodeDrainRequest,
    NodeEntry,
    NodeList,
    PoolEntry,
    PoolList,
    PoolWindowEntry,
)
from syringa.config import Config
from syringa.engine.interface import EngineProvider
from syringa.errors import InvalidRequest, NotFound
from syringa.fleet.provider import LOCAL_NODE
from syringa.fleet.schedule import PoolSchedule
from syringa.fleet.status import FleetMove, NodeStatus, PoolStatus
from syringa.http import dependencies

_OVERRIDES = {True: "open", False: "closed"}


class FleetRoutes:
    def __init__(self, config: Config, engines: EngineProvider) -> None:
        self._config, self._engines = config, engines

    async def list_nodes(self, request: Request) -> Response:
        return dependencies.json(NodeList(data=[_node_entry(each) for each in self._engines.fleet().nodes]))

    async def drain_node(self, request: Request) -> Response:
        """Begin to drain a node. The response does not wait until it has left."""
        body, ignored = await dependencies.read_body(request, NodeDrainRequest)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        name = request.path_params["node"]
        node = next((each for each in self._engines.fleet().nodes if each.name == name), None)
        if node is None:
            raise NotFound(f"There is no node {name!r}.", code="node_not_found")
        if name == LOCAL_NODE:
            raise InvalidRequest("The only node is the server itself: stop the server, or drain its replicas.")
        self._engines.drain_node(name, body.grace)
        return dependencies.json(msgspec.structs.replace(_node_entry(node), state="draining", offered=False), headers)

    async def list_pools(self, request: Request) -> Response:
        return dependencies.json(PoolList(data=[self._pool_entry(each) for each in self._engines.fleet().pools]))

    async def list_moves(self, request: Request) -> Response:
        return dependencies.json(MoveList(data=[_move_entry(each) for each in self._engines.fleet().moves]))

    async def open_pool(self, request: Request) -> Response:
        return self._set_pool(request, True)

    async def close_pool(self, request: Request) -> Response:
        return self._set_pool(request, False)

    async def reset_pool(self, request: Request) -> Response:
        return self._set_pool(request, None)

    def _set_pool(self, request: Request, open: bool | None) -> Response:
        """Open, close or reset a pool. The response has what was asked for, and the state from before."""
        name = request.path_params["pool"]
        pool = next((each for each in self._engines.fleet().pools if each.name == name), None)
        if pool is None:
            raise NotFound(f"There is no pool {name!r}.", code="pool_not_found")
        self._engines.set_pool(name, open)
        return dependencies.json(self._pool_entry(msgspec.structs.replace(pool, override=open)))

    def _pool_entry(self, pool: PoolStatus) -> PoolEntry:
        schedules = (each.schedule for each in self._config.pools if each.name == pool.name)
        return _pool_entry(pool, next(schedules, PoolSchedule()))


def _move_entry(move: FleetMove) -> MoveEntry:
    return MoveEntry(
        at=int(move.at),
        action=move.action,
        replica=move.replica,
        model=move.model or None,
        node=move.node or None,
        reason=move.reason,
    )


def _node_entry(node: NodeStatus) -> NodeEntry:
    return NodeEntry(
        name=node.name,
        state=node.state,
        pool=node.pool or None,
        offered=node.offered,
        reason=node.reason or None,
        gpus=node.gpus,
        cpus=node.cpus or None,
        memory=node.memory or None,
        replicas=node.replicas,
        labels=node.labels,
    )


def _pool_entry(pool: PoolStatus, schedule: PoolSchedule) -> PoolEntry:
    return PoolEntry(
        name=pool.name,
        state=pool.state,
        reason=pool.reason or None,
        mode=pool.mode,
        override=None if pool.override is None else _OVERRIDES[pool.override],
        changes_at=None if pool.changes_at is None else int(pool.changes_at),
        nodes=pool.nodes,
        offered=pool.offered,
        gpus=pool.gpus,
        gpus_used=pool.gpus_used,
        cpus=pool.cpus,
        cpus_used=pool.cpus_used,
        replicas=pool.replicas,
        timezone=schedule.timezone,
        windows=[PoolWindowEntry(days=list(each.days), start=each.start, end=each.end) for each in schedule.windows],
    )
