"""Endpoints of the server itself: health, readiness, status, metrics, and the API reference."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.models.served_model import Models
from syringa.engine.interface import NOT_READY, EngineProvider, LoadStatus
from syringa.errors import EngineUnavailable, SyringaError
from syringa.http import dependencies
from syringa.http.context import request_context
from syringa.service.app_state import AppState
from syringa.service.auth.keys import Caller
from syringa.service.metrics.engine_metrics import EngineReport
from syringa.service.metrics.metrics import CONTENT_TYPE
from syringa.service.metrics.status import ModelStatus
from syringa.store import BatchCounts
from syringa.types import EngineStats

STATS_SECONDS = 2.0  # for an engine to report its statistics, which are left out otherwise

_NOT_READY_MESSAGES: dict[LoadStatus, str] = {
    "hanging": "The model does not respond.",
    "loading": "The model is loading.",
    "failed": "The model could not be loaded.",
}

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
        """Respond with 503 while the default model is loading, hangs or has failed.

        An unloaded idle model counts as ready.
        """
        if self._app_state.draining:
            raise EngineUnavailable("The server is being stopped.", code="server_ending")
        if (status := self._engines.status(self._models.default)) in NOT_READY:
            raise EngineUnavailable(_NOT_READY_MESSAGES[status])
        return dependencies.json({"status": "ready"})

    async def status(self, request: Request) -> Response:
        return dependencies.json(await self._status.report(request.query_params.get("window")))

    async def metrics(self, request: Request) -> Response:
        """Respond with all metrics to an administrator, to the key of the only organization, and without keys.

        Other keys see nothing that depends on other organizations.
        """
        caller = request_context(request.scope).caller
        if caller is not None and not sees_all_organizations(caller, self._app_state):
            reports = {model: self._worker_report(model) for model in self._models.for_key(caller.models).ids}
            text = self._app_state.metrics.render_public(reports)
            return Response(text, headers={"content-type": CONTENT_TYPE})
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
        reports = await asyncio.gather(*(self._engine_report(model) for model in models))
        fleet, batches = self._engines.fleet(), await self._count_batches()
        return await self._app_state.metrics.render(dict(zip(models, reports, strict=True)), fleet, batches)

    async def _count_batches(self) -> Sequence[BatchCounts]:
        """Return the unfinished batches by status; none if the database does not answer."""
        store = self._app_state.store
        if store.location.is_empty():
            return ()
        with contextlib.suppress(SyringaError, TimeoutError):
            return await asyncio.wait_for(store.poll(lambda session: session.batches.counts()), STATS_SECONDS)
        return ()

    async def _engine_report(self, model: str) -> EngineReport:
        """Return what is known of a model's engine, without statistics if it does not respond."""
        return self._worker_report(model)._replace(stats=await read_engine_stats(self._engines, model))

    def _worker_report(self, model: str) -> EngineReport:
        status, counts = self._engines.status(model), self._engines.worker_counts(model)
        replicas: Counter[str] = Counter(each.status for each in self._engines.replicas(model))
        return EngineReport(None, status in ("loaded", "hanging"), status not in NOT_READY, *counts, replicas)


def sees_all_organizations(caller: Caller | None, app_state: AppState) -> bool:
    """Whether a caller may see figures that depend on all organizations. None: no API key was needed."""
    return caller is None or caller.admin or app_state.keys.single_organization


async def read_engine_stats(engines: EngineProvider, model: str) -> EngineStats | None:
    """Return the statistics of a model's engine; None if it is not loaded or does not respond."""
    with contextlib.suppress(SyringaError, TimeoutError):
        engine = engines.engine(model)
        return await asyncio.wait_for(engine.stats(), STATS_SECONDS) if engine.ready else None
    return None
