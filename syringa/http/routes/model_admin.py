"""Administration of models at run time. Every process applies a change within a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.decoding import decode_object
from syringa.api.models.entries import LoadingEntry, to_loading_entry
from syringa.api.models.loading import describe_model
from syringa.api.models.model_files import files_entry, find_files
from syringa.api.models.registry import ModelRegistry
from syringa.api.models.served_model import Models
from syringa.config import ModelSpec
from syringa.engine.interface import EngineProvider
from syringa.errors import InvalidRequest, NotFound, StartupError, SyringaError
from syringa.http import dependencies
from syringa.http.routes.system import read_engine_stats
from syringa.modelfiles.remove import is_pulled, remove
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.http")

NOT_CHANGEABLE = "The models of this server cannot be changed at run time."

_UNLOAD_SECONDS = 0.001  # idle seconds after which a model is unloaded that is not to be kept
_SHOWN_INFO = ("architecture", "dtype", "max_model_len", "parameters", "kernels", "threads", "load_seconds")
_RESERVED = ("available", "pull", "pulls")


class ModelAdminRoutes:
    """Where models cannot be added at run time, those of the settings can only be listed."""

    def __init__(self, engines: EngineProvider, models: Models, app_state: AppState) -> None:
        self._engines, self._models, self._app_state = engines, models, app_state
        self._loading: set[asyncio.Task[None]] = set()

    async def list(self, request: Request) -> Response:
        specs = self._registry.specs if isinstance(self._models, ModelRegistry) else ()
        return dependencies.json({"object": "list", "data": await asyncio.gather(*map(self._entry, specs))})

    async def show(self, request: Request) -> Response:
        return dependencies.json(await self._entry(self._spec(request.path_params["model_id"])))

    async def put(self, request: Request) -> Response:
        """Add a model or replace its configuration. Fields that are absent get the values of the settings."""
        id = request.path_params["model_id"]
        check_reserved(id)
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
        """Remove a model, and with `files=true` its files. Its running requests may finish."""
        id, query = request.path_params["model_id"], request.query_params
        dependencies.check_parameters(query, ("files",))
        with_files = dependencies.query_flag(query, "files")
        path = next((spec.path for spec in self._registry.specs if spec.id == id), "")
        if not await self._catalog.delete(id):
            spec = self._spec(id)
            raise InvalidRequest(f"The model {spec.id!r} is defined in the settings: remove it there.", param="id")
        deleted = with_files and await asyncio.to_thread(self._delete_files, path)
        return dependencies.json({"id": id, "object": "model", "deleted": True, "files_deleted": deleted})

    async def load(self, request: Request) -> Response:
        """Begin to load a model. The response does not wait until it is loaded."""
        spec = self._spec(request.path_params["model_id"])
        entry = await self._entry(spec)
        if entry["status"] in ("cold", "failed"):
            task = asyncio.create_task(self._load(spec.id))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
            entry["status"], entry["loading"] = "loading", LoadingEntry("queued", None, 0.0)
        return dependencies.json(entry)

    async def unload(self, request: Request) -> Response:
        """Unload a model as soon as its running requests have finished."""
        spec = self._spec(request.path_params["model_id"])
        self._engines.keep(spec.id, _UNLOAD_SECONDS)
        return dependencies.json(await self._entry(spec))

    async def _load(self, id: str) -> None:
        try:
            await self._engines.engine(id).wait_ready()
        except SyringaError as error:
            logger.warning("model could not be loaded: model=%s error=%s", id, error.message)

    def _delete_files(self, path: str) -> bool:
        """Delete the files of a model that was removed. Return False if they were not pulled, or are used."""
        found = find_files(path)
        if found is None or not is_pulled(found.files):
            return False
        used = (find_files(spec.path) for spec in self._registry.specs)
        if any(each is not None and each.files.path == found.files.path for each in used):
            return False
        try:
            remove(found.files)
        except StartupError as error:
            logger.error("files of a removed model stay: path=%s error=%s", found.files.path, error.message)
            return False
        return True

    async def _entry(self, spec: ModelSpec) -> dict[str, Any]:
        model = await self._registry.show(spec.id)
        configuration: dict[str, Any] = msgspec.to_builtins(spec)
        files = await asyncio.to_thread(find_files, spec.path)
        info, stats = await self._info(spec.id), await read_engine_stats(self._engines, spec.id)
        tokens = stats.blocks_total * stats.block_size if stats is not None else 0
        used = stats.blocks_total - stats.blocks_free - stats.blocks_cached if stats is not None else 0
        return configuration | {
            "object": "model_configuration",
            "status": model.status,
            "loading": None if model.loading is None else to_loading_entry(model.loading),
            "error": self._error(spec.id),
            "removable": not self._registry.is_configured(spec.id),
            "files": files_entry(files),
            "loaded": None if info is None else {name: getattr(info, name) for name in _SHOWN_INFO},
            "engine_stats": None
            if stats is None
            else {
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_tokens": tokens,
                "kv_tokens_used": used * stats.block_size,
                "idle_seconds": stats.idle_seconds,
                "prefix_caching": stats.prefix_caching,
            },
            "memory_bytes": None if stats is None or files is None else files.bytes + tokens * files.cache_bytes,
            "idle_timeout": self._engines.idle_timeout(spec.id),
        }

    def _error(self, id: str) -> str | None:
        """Return why a model could not be loaded or does not respond. It may name files: it is for operators only."""
        if self._engines.status(id) in ("hanging", "failed"):
            return self._engines.reason(id) or None
        return self._registry.failure(id) or None

    async def _info(self, id: str) -> ModelInfo | None:
        """Return the description of a model that is loaded."""
        with contextlib.suppress(SyringaError):
            engine = self._engines.engine(id)
            return (await engine.wait_ready()).info if engine.ready else None
        return None

    def _spec(self, id: str) -> ModelSpec:
        for spec in self._registry.specs:
            if spec.id == id:
                return spec
        raise NotFound(f"There is no model {id!r}.", code="model_not_found")

    @property
    def _registry(self) -> ModelRegistry:
        if not isinstance(self._models, ModelRegistry):
            raise InvalidRequest(NOT_CHANGEABLE)
        return self._models

    @property
    def _catalog(self) -> ModelCatalog:
        if self._app_state.catalog is None:
            raise InvalidRequest(NOT_CHANGEABLE)
        return self._app_state.catalog


def check_reserved(id: str) -> None:
    """Raise `InvalidRequest` for an id whose path is that of another endpoint."""
    if id.partition("/")[0] in _RESERVED:
        raise InvalidRequest(f"id: {id!r:.100} is reserved, choose another.", param="id")
