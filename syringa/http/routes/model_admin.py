"""Administration of models at run time. Every process applies a change within a second."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.decoding import decode_object
from syringa.api.models.loading import describe_model
from syringa.api.models.registry import ModelRegistry
from syringa.api.models.served_model import Models
from syringa.config import ModelSpec
from syringa.errors import InvalidRequest, NotFound, StartupError
from syringa.http import dependencies
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog


class ModelAdminRoutes:
    """Where models cannot be added at run time, those of the settings can only be listed."""

    def __init__(self, models: Models, app_state: AppState) -> None:
        self._models, self._app_state = models, app_state

    async def list(self, request: Request) -> Response:
        specs = self._registry.specs if isinstance(self._models, ModelRegistry) else ()
        return dependencies.json({"object": "list", "data": [await self._entry(spec) for spec in specs]})

    async def show(self, request: Request) -> Response:
        return dependencies.json(await self._entry(self._spec(request.path_params["model_id"])))

    async def put(self, request: Request) -> Response:
        """Add a model or replace its configuration. Fields that are absent get the values of the settings."""
        id = request.path_params["model_id"]
        dependencies.check_json(request)
        fields = {name: value for name, value in decode_object(await request.body()).items() if value is not None}
        if fields.pop("id", id) != id:
            raise InvalidRequest("id: differs from the id in the URL.", param="id")
        try:
            spec = self._catalog.read(id, fields)
            self._registry.check_names(spec)
            await asyncio.to_thread(describe_model, spec, int(time.time()))
        except StartupError as error:
            raise InvalidRequest(error.message, param=error.param or "path") from None
        await self._catalog.put(spec, fields)
        return dependencies.json(await self._entry(self._spec(id)))

    async def delete(self, request: Request) -> Response:
        """Remove a model. Its running requests may finish."""
        id = request.path_params["model_id"]
        if not await self._catalog.delete(id):
            spec = self._spec(id)
            raise InvalidRequest(f"The model {spec.id!r} is defined in the settings: remove it there.", param="id")
        return dependencies.json({"id": id, "object": "model", "deleted": True})

    async def _entry(self, spec: ModelSpec) -> dict[str, Any]:
        model = await self._registry.show(spec.id)
        configuration: dict[str, Any] = msgspec.to_builtins(spec)
        return {"object": "model_configuration", "status": model.status} | configuration

    def _spec(self, id: str) -> ModelSpec:
        for spec in self._registry.specs:
            if spec.id == id:
                return spec
        raise NotFound(f"There is no model {id!r}.", code="model_not_found")

    @property
    def _registry(self) -> ModelRegistry:
        if not isinstance(self._models, ModelRegistry):
            raise InvalidRequest("The models of this server cannot be changed at run time.")
        return self._models

    @property
    def _catalog(self) -> ModelCatalog:
        if self._app_state.catalog is None:
            raise InvalidRequest("The models of this server cannot be changed at run time.")
        return self._app_state.catalog
