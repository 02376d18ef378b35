"""`/admin/series`: figures over time, from what all processes have stored."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.models.served_model import Models
from syringa.engine.interface import EngineProvider
from syringa.errors import InvalidRequest, SyringaError
from syringa.http import dependencies
from syringa.http.routes.system import read_engine_stats
from syringa.service.app_state import AppState
from syringa.service.series.report import TimeRange, plan_range, report
from syringa.types import EngineStats

_DURATION = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_KEEP_SHARE, _MAX_KEEP_SECONDS = 20, 60.0  # a report is kept for a twentieth of its step, up to a minute
_MAX_REPORTS = 64

_Key = tuple[int | None, int, int, str | None]  # length, step, end and model


class SeriesRoutes:
    def __init__(self, app_state: AppState) -> None:
        self._store = app_state.store
        self._reports: dict[_Key, tuple[float, asyncio.Task[bytes]]] = {}  # with the time until which each is kept

    async def series(self, request: Request) -> Response:
        query = request.query_params
        dependencies.check_parameters(query, ("range", "step", "until", "model"))
        until = dependencies.query_int(query, "until", -1, low=0, high=2**53)
        seconds, step = _read_duration(query, "range"), _read_duration(query, "step")
        range = plan_range(time.time(), seconds, step, None if until < 0 else until)
        model = query.get("model") or None
        body = await self._cached((seconds, range.step, until, model), range)
        return Response(body, media_type="application/json")

    async def _cached(self, key: _Key, range: TimeRange) -> bytes:
        """Return a report that is recent enough for its step. Requests for the same one share its computation."""
        now = time.monotonic()
        for old in [each for each, (kept, task) in self._reports.items() if now >= kept and task.done()]:
            del self._reports[old]
        found = self._reports.get(key)
        if found is None or now >= found[0] or (found[1].done() and found[1].exception() is not None):
            until = now + min(range.step / _KEEP_SHARE, _MAX_KEEP_SECONDS)
            found = self._reports[key] = until, asyncio.create_task(self._read(key, range))
            if len(self._reports) > _MAX_REPORTS:
                del self._reports[next(iter(self._reports))]
        return await asyncio.shield(found[1])

    async def _read(self, key: _Key, range: TimeRange) -> bytes:
        rows, model = [], key[-1]
        if not self._store.location.is_empty():
            rows = await self._store.read(lambda session: session.series.read(range.start, range.end, model))
        # In a thread: a month of many models takes a while.
        return await asyncio.to_thread(lambda: msgspec.json.encode({"object": "series"} | report(rows, range)))


async def read_all_stats(engines: EngineProvider, models: Models) -> dict[str, EngineStats]:
    """Return the statistics of the engines that are loaded and respond, by model.

    Of models that share an engine, only the first has them.
    """
    ids: list[str] = []
    seen: set[int] = set()
    for model in models.ids:
        with contextlib.suppress(SyringaError):
            engine = id(engines.engine(model))
            if engine not in seen:
                seen.add(engine)
                ids.append(model)
    found = await asyncio.gather(*(read_engine_stats(engines, model) for model in ids))
    return {model: stats for model, stats in zip(ids, found, strict=True) if stats is not None}


def _read_duration(query: QueryParams, name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{name}: expected a duration such as 5m, 24h or 30d, not {text[:40]!r}.", param=name)
    return int(match[1]) * _UNITS[match[2]]
