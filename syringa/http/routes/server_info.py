"""Endpoints that describe the server, in the shapes of vLLM and llama.cpp, for programs that probe it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from syringa.api import server_info
from syringa.api.models.served_model import ALL_KINDS, Models, ServedModel
from syringa.config import Config
from syringa.engine.interface import EngineProvider
from syringa.errors import Forbidden
from syringa.http import dependencies
from syringa.http.context import request_context
from syringa.http.routes.system import read_engine_stats, sees_all_organizations
from syringa.service.app_state import AppState
from syringa.version import installed_version


class ServerInfoRoutes:
    def __init__(self, config: Config, engines: EngineProvider, models: Models, app_state: AppState) -> None:
        self._config, self._engines, self._models, self._app_state = config, engines, models, app_state
        self._reading_load: asyncio.Task[int] | None = None

    async def version(self, request: Request) -> Response:
        return dependencies.json(server_info.VersionInfo(installed_version()))

    async def load(self, request: Request) -> Response:
        """Respond with the load of all engines, if the key may see all metrics."""
        if not sees_all_organizations(request_context(request.scope).caller, self._app_state):
            raise Forbidden("An administrator's key is needed: the load is that of all organizations.")
        # Concurrent requests share one reading, so that their number does not matter.
        if self._reading_load is None or self._reading_load.done():
            self._reading_load = asyncio.create_task(self._read_load())
        return dependencies.json(server_info.LoadInfo(await asyncio.shield(self._reading_load)))

    async def tokenizer_info(self, request: Request) -> Response:
        return dependencies.json(server_info.describe_tokenizer(await self._model(request)))

    async def props(self, request: Request) -> Response:
        model = await self._model(request)
        in_memory = self._engines.status(model.id) in ("loaded", "hanging")
        props = server_info.describe_model(model, max_running=self._config.max_running, in_memory=in_memory)
        return dependencies.json(props)

    async def _read_load(self) -> int:
        reports = await asyncio.gather(*(read_engine_stats(self._engines, model) for model in self._models.ids))
        return sum(stats.running + stats.waiting for stats in reports if stats is not None)

    async def _model(self, request: Request) -> ServedModel:
        """Return the model that the query names, by default the default model."""
        models = self._models.for_key(dependencies.caller(request).models)
        return await models.find(request.query_params.get("model"), ALL_KINDS)
