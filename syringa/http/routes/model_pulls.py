"""Pulls of models, which go on without the request that began them, and the models that can be pulled."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.models.downloads import ModelDownloads, measure, source_of
from syringa.api.models.loading import describe_model
from syringa.api.models.model_files import AvailableModelList, available_models
from syringa.api.models.registry import ModelRegistry
from syringa.api.models.served_model import Models
from syringa.api.models.specs import pulled_fields
from syringa.api.pulls import ModelPullRequest, PullEntry, PullFile, PullList
from syringa.config import Config
from syringa.errors import InvalidRequest, NotFound, StartupError
from syringa.http import dependencies
from syringa.http.routes.model_admin import NOT_CHANGEABLE, check_reserved
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog
from syringa.service.pulls import OnFile, PullManager, decode_files
from syringa.store import StoredPull


class ModelPullRoutes:
    def __init__(self, config: Config, models: Models, app_state: AppState, downloads: ModelDownloads) -> None:
        self._config, self._models, self._app_state, self._downloads = config, models, app_state, downloads
        self._pulls = PullManager(
            app_state.store,
            app_state.responses.process,
            download=self._download,
            measure=lambda model: asyncio.to_thread(measure, model),
            add=self._add,
        )
        app_state.drain_callbacks.add(self._pulls.stop)

    async def available(self, request: Request) -> Response:
        return dependencies.json(AvailableModelList(data=await asyncio.to_thread(available_models)))

    async def start(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, ModelPullRequest)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        source = source_of(body.model)
        if source is None:
            raise InvalidRequest(
                f"model: {body.model!r:.200} cannot be pulled: expected a name of the list of available models, or "
                "ORGANIZATION/REPOSITORY of the Hugging Face Hub.",
                param="model",
            )
        serve_as = body.id or source
        self._check(serve_as, source)
        return dependencies.json(_to_entry(await self._pulls.start(source, serve_as)), headers)

    async def list(self, request: Request) -> Response:
        return dependencies.json(PullList(data=[_to_entry(each) for each in await self._pulls.all()]))

    async def show(self, request: Request) -> Response:
        id = request.path_params["pull_id"]
        return dependencies.json(_found(await self._pulls.get(id), id))

    async def end(self, request: Request) -> Response:
        """Cancel a pull that is running, or forget one that has ended."""
        id = request.path_params["pull_id"]
        return dependencies.json(_found(await self._pulls.end(id), id))

    async def _download(self, model: str, on_file: OnFile) -> None:
        await self._downloads.run(model, lambda file, done: on_file(file.name, file.size, done))

    def _check(self, id: str, source: str) -> None:
        """Raise `InvalidRequest` if the model could not be added after it was downloaded."""
        registry, catalog = self._registry(), self._catalog()
        check_reserved(id)
        if id in registry.ids:
            return
        try:
            registry.check_names(catalog.read(id, {"path": source}))
        except StartupError as error:
            raise InvalidRequest(error.message, param="id") from None

    async def _add(self, id: str, source: str) -> None:
        """Add a model to those of the server, unless it is one of them."""
        registry, catalog = self._registry(), self._catalog()
        if id in registry.ids:
            return
        fields = await asyncio.to_thread(pulled_fields, source, self._config)
        spec = catalog.read(id, fields)
        registry.check_names(spec)
        await asyncio.to_thread(describe_model, spec, int(time.time()))
        await catalog.put(spec, fields)

    def _registry(self) -> ModelRegistry:
        if not isinstance(self._models, ModelRegistry):
            raise InvalidRequest(NOT_CHANGEABLE)
        return self._models

    def _catalog(self) -> ModelCatalog:
        if self._app_state.catalog is None:
            raise InvalidRequest(NOT_CHANGEABLE)
        return self._app_state.catalog


def _found(pull: StoredPull | None, id: str) -> PullEntry:
    if pull is None:
        raise NotFound(f"There is no pull {id!r:.100}.", code="pull_not_found")
    return _to_entry(pull)


def _to_entry(pull: StoredPull) -> PullEntry:
    files = [PullFile(**msgspec.structs.asdict(file)) for file in decode_files(pull.files)]
    completed = sum(file.completed_bytes for file in files)
    return PullEntry(
        id=pull.id,
        model=pull.model,
        serve_as=pull.serve_as,
        status=pull.status,
        stage=pull.stage,
        completed_bytes=completed,
        total_bytes=pull.total_bytes,
        bytes_per_second=pull.bytes_per_second,
        files=files,
        error=pull.error,
        created_at=pull.created_at,
        updated_at=int(pull.updated_at),
        ended_at=pull.ended_at,
    )
