"""`/metrics` for Prometheus and `/status` for people: how the server does, and how its models did."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from syringa.engine.interface import Fleet
from syringa.errors import SyringaError
from syringa.http import dependencies
from syringa.http.routing import Route
from syringa.service.metrics.metrics import CONTENT_TYPE, Metrics
from syringa.service.metrics.status import Models, Status
from syringa.types import EngineStats

STATS_SECONDS = 2.0  # for an engine to answer; without it, the others' figures are still worth having


class Observing:
    """The handlers."""

    def __init__(self, metrics: Metrics, status: Status, fleet: Fleet, models: Models) -> None:
        self._metrics, self._status, self._fleet, self._models = metrics, status, fleet, models
        self._rendering: asyncio.Task[bytes] | None = None

    def routes(self) -> list[BaseRoute]:
        return [Route("/metrics", self.metrics), Route("/status", self.status)]

    async def metrics(self, request: Request) -> Response:
        # Whoever asks meanwhile gets the same text: it must not matter how many do.
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._render())
        return Response(await asyncio.shield(self._rendering), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        return dependencies.json(await self._status.report(request.query_params.get("window")))

    async def _render(self) -> bytes:
        models = [id for id, _ in self._models()]
        stats: dict[str, EngineStats | None] = {}
        await asyncio.gather(*(self._ask(model, stats) for model in models))
        return await self._metrics.render({model: stats[model] for model in models if model in stats})

    async def _ask(self, model: str, stats: dict[str, EngineStats | None]) -> None:
        """A model that is not loaded is not loaded for this. An engine that does not answer is left out."""
        with contextlib.suppress(SyringaError, TimeoutError):
            engine = self._fleet.engine(model)
            stats[model] = await asyncio.wait_for(engine.stats(), STATS_SECONDS) if engine.ready else None
