"""Administration of the replicas of models: list them, and drain one."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.admin import DrainRequest, ReplicaEntry, ReplicaList
from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.engine.interface import EngineProvider
from syringa.errors import NotFound
from syringa.http import dependencies


class ReplicaRoutes:
    def __init__(self, config: Config, engines: EngineProvider, models: Models) -> None:
        self._config, self._engines, self._models = config, engines, models

    async def list(self, request: Request) -> Response:
        return dependencies.json(ReplicaList(data=[*self._entries().values()]))

    async def drain(self, request: Request) -> Response:
        """Begin to drain a replica. The response does not wait until it has ended."""
        body, ignored = await dependencies.read_body(request, DrainRequest)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        id = request.path_params["replica_id"]
        entry = self._entries().get(id)
        if entry is None:
            raise NotFound(f"There is no replica {id!r}.", code="replica_not_found")
        self._engines.drain(id, self._config.drain_timeout if body.grace is None else body.grace)
        return dependencies.json(msgspec.structs.replace(entry, status="draining"), headers)

    def _entries(self) -> dict[str, ReplicaEntry]:
        """Return the replicas of all models by id. Models with equal options share theirs."""
        entries: dict[str, ReplicaEntry] = {}
        for model in self._models.ids:
            for state in self._engines.replicas(model):
                entry = ReplicaEntry(
                    id=state.id,
                    model=model,
                    status=state.status,
                    node=state.node,
                    fingerprint=state.fingerprint,
                    reason=state.reason or None,
                )
                entries.setdefault(state.id, entry)
        return entries
