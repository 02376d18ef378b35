"""`/admin/models`: models are configured while the server runs, and every process has them within a second."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from syringa.api.decoding import decode_object
from syringa.api.models.loading import describe_model
from syringa.api.models.registry import Registry
from syringa.api.models.served_model import Models
from syringa.config import Config, ModelSpec
from syringa.errors import InvalidRequest, NotFound, StartupError
from syringa.http import dependencies
from syringa.http.routes.admin import check_admin
from syringa.http.routing import Route
from syringa.service.app_state import Work
from syringa.service.model_catalog import Catalogue

_ID = "/admin/models/{model_id:path}"


class AdminModels:
    """The handlers. Where the models are those of the settings alone, they can be looked at."""

    def __init__(self, config: Config, models: Models, work: Work) -> None:
        self._config, self._models, self._work = config, models, work

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/admin/models", self.list),
            Route(_ID, self.show),
            Route(_ID, self.put, methods=["PUT"]),
            Route(_ID, self.delete, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        check_admin(request)
        specs = self._registry.specs if isinstance(self._models, Registry) else ()
        return dependencies.json({"object": "list", "data": [await self._entry(spec) for spec in specs]})

    async def show(self, request: Request) -> Response:
        check_admin(request)
        return dependencies.json(await self._entry(self._spec(request.path_params["model_id"])))

    async def put(self, request: Request) -> Response:
        """The whole description: what it does not say is as the settings say, whatever was said before."""
        check_admin(request)
        id = request.path_params["model_id"]
        dependencies.check_json(request)
        fields = {name: value for name, value in decode_object(await request.body()).items() if value is not None}
        if fields.pop("id", id) != id:
            raise InvalidRequest("id: the model's id is in the address.", param="id")
        try:
            spec = self._catalogue.read(id, fields)
            self._registry.check(spec)
            await asyncio.to_thread(describe_model, spec, int(time.time()))
        except StartupError as error:
            raise InvalidRequest(error.message, param=error.param or "path") from None
        await self._catalogue.put(spec, fields)
        return dependencies.json(await self._entry(self._spec(id)))

    async def delete(self, request: Request) -> Response:
        """It is gone at once; what runs on it may finish."""
        check_admin(request)
        id = request.path_params["model_id"]
        if not await self._catalogue.delete(id):
            spec = self._spec(id)
            raise InvalidRequest(f"The model {spec.id!r} is in the settings, and is removed there.", param="id")
        return dependencies.json({"id": id, "object": "model", "deleted": True})

    async def _entry(self, spec: ModelSpec) -> dict[str, Any]:
        card = await self._registry.show(spec.id)
        said: dict[str, Any] = msgspec.to_builtins(spec)
        return {"object": "model_configuration", "status": card.status} | said

    def _spec(self, id: str) -> ModelSpec:
        for spec in self._registry.specs:
            if spec.id == id:
                return spec
        raise NotFound(f"There is no model {id!r}.", code="model_not_found")

    @property
    def _registry(self) -> Registry:
        if not isinstance(self._models, Registry):
            raise InvalidRequest("The models of this server are fixed.")
        return self._models

    @property
    def _catalogue(self) -> Catalogue:
        if self._work.catalogue is None:
            raise InvalidRequest("The models of this server are fixed.")
        return self._work.catalogue
