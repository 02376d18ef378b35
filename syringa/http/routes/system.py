"""Endpoints of the server itself: health, readiness, status, metrics, and the API reference."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.models.served_model import Models
from syringa.engine.interface import EngineProvider
from syringa.errors import EngineUnavailable, SyringaError
from syringa.http import dependencies
from syringa.service.app_state import AppState
from syringa.service.metrics.metrics import CONTENT_TYPE
from syringa.service.metrics.status import ModelStatus
from syringa.types import EngineStats

STATS_SECONDS = 2.0  # for an engine to report its statistics; one that does not is left out

_DOCS_PAGE = Path(__file__).with_name("docs.html")
# The page is self-contained, and connects to this server only.
_DOCS_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class SystemRoutes:
    def __init__(
        self,
        engines: EngineProvider,
        models: Models,
        app_state: AppState,
        status: ModelStatus,
        document: Callable[[], dict[str, Any]],
    ) -> None:
        """`document` generates the OpenAPI document."""
        self._engines, self._models, self._app_state, self._document = engines, models, app_state, document
        self._status = status
        self._rendering: asyncio.Task[bytes] | None = None

    async def health(self, request: Request) -> Response:
        """Respond whenever this process is alive, whatever the state of the models."""
        return dependencies.json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Respond with 503 while the default model is loading or has failed. An unloaded idle model counts as ready."""
        if self._app_state.draining:
            raise EngineUnavailable("The server is being stopped.", code="server_ending")
        if self._engines.status(self._models.default) in ("loading", "failed"):
            raise EngineUnavailable("The model is loading.")
        return dependencies.json({"status": "ready"})

    async def status(self, request: Request) -> Response:
        return dependencies.json(await self._status.report(request.query_params.get("window")))

    async def metrics(self, request: Request) -> Response:
        # Concurrent scrapes share one rendering, so that their number does not matter.
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._render_metrics())
        return Response(await asyncio.shield(self._rendering), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return Response(self._encoded_document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        headers = {"content-security-policy": _DOCS_PAGE_POLICY}
        return Response(_DOCS_PAGE.read_bytes(), headers=headers, media_type="text/html")

    @functools.cached_property
    def _encoded_document(self) -> bytes:
        return msgspec.json.encode(self._document())

    async def _render_metrics(self) -> bytes:
        models = self._models.ids
        stats: dict[str, EngineStats | None] = {}
        await asyncio.gather(*(self._collect_stats(model, stats) for model in models))
        return await self._app_state.metrics.render({model: stats[model] for model in models if model in stats})

    async def _collect_stats(self, model: str, stats: dict[str, EngineStats | None]) -> None:
        """Add the statistics of a model: None if it is not loaded, nothing if its engine does not respond."""
        with contextlib.suppress(SyringaError, TimeoutError):
            engine = self._engines.engine(model)
            stats[model] = await asyncio.wait_for(engine.stats(), STATS_SECONDS) if engine.ready else None
