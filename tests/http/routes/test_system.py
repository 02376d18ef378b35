from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from syringa.engine.interface import Engine, LoadStatus, ReplicaState, WorkerCounts
from syringa.errors import EngineUnavailable, InvalidRequest, NotFound
from syringa.fleet.status import FleetStatus, NodeStatus
from syringa.http.context import RequestContext, set_request_context
from syringa.http.routes import system
from syringa.http.routes.system import SystemRoutes
from syringa.service.auth.keys import Caller
from syringa.service.metrics.metrics import Metrics
from syringa.service.metrics.status import ModelStatus
from syringa.store.records import ModelUsage
from syringa.types import EngineStats
from tests.client import eventually, settle
from tests.fake_engine import FakeEngine
from tests.service.metrics.test_metrics import accounting, parsed, value


class SilentEngine(FakeEngine):
    """An engine that never reports its statistics, or raises an error instead."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    async def stats(self) -> EngineStats:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        raise AssertionError


class Engines:
    def __init__(self, **engines: FakeEngine) -> None:
        self.engines = engines

    def engine(self, model: str) -> Engine:
        if model not in self.engines:
            raise NotFound(f"the model {model} was removed")
        return self.engines[model]

    def status(self, model: str) -> LoadStatus:
        if model not in self.engines:
            return "cold"
        return "loaded" if self.engines[model].ready else "loading"

    def worker_counts(self, model: str) -> WorkerCounts:
        return WorkerCounts(hangs=2, crashes=1)

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        return [ReplicaState("m-1", "ready"), ReplicaState("m-2", "ready"), ReplicaState("m-3", "draining")]

    def fleet(self) -> FleetStatus:
        return FleetStatus([NodeStatus("local", "ready")])


class Service:
    """`/metrics` and `/status` over engines by name. The engines of `removed` models do not exist."""

    def __init__(self, *removed: str, **engines: FakeEngine) -> None:
        self.metrics = Metrics("syringa_")
        self.asked: list[float] = []
        ids = (*engines, *removed)
        status = ModelStatus(self.read, lambda: [(id, id.title()) for id in ids], lambda: 1e9)
        models = SimpleNamespace(ids=ids, for_key=lambda allowed: SimpleNamespace(ids=allowed or ids))
        self.caller: Caller | None = None
        self.keys = SimpleNamespace(single_organization=False)
        no_store = SimpleNamespace(location=SimpleNamespace(is_empty=lambda: True))
        app_state = SimpleNamespace(metrics=self.metrics, keys=self.keys, store=no_store)
        handlers = SystemRoutes(cast(Any, Engines(**engines)), cast(Any, models), cast(Any, app_state), status, dict)
        self.router = Router([Route("/metrics", handlers.metrics), Route("/status", handlers.status)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext("id", {}, cast(Any, None), None, caller=self.caller)
        set_request_context(scope, context)
        await self.router(scope, receive, send)

    async def read(self, since: float) -> Sequence[ModelUsage]:
        self.asked.append(since)
        return []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self), base_url="http://localhost")


async def test_metrics_are_prometheus_text() -> None:
    service = Service(warm=FakeEngine())
    service.metrics.observe(accounting("warm"))
    async with service.client() as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(answer.content)
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="warm") == 1
    assert value(found, "syringa_num_requests_running", model_name="warm") == 0


async def test_metrics_show_replicas_by_status_and_moves_by_reason() -> None:
    service = Service(warm=FakeEngine())
    for same in (True, True, False):
        service.metrics.count_move("warm", "drain", same)
        service.metrics.count_route("warm", same)
    async with service.client() as http:
        found = parsed((await http.get("/metrics")).content)
    assert value(found, "syringa_replicas", model_name="warm", status="ready") == 2
    assert value(found, "syringa_replicas", model_name="warm", status="draining") == 1
    moves = {"model_name": "warm", "reason": "drain"}
    assert value(found, "syringa_request_moves_total", **moves, fingerprint="same") == 2
    assert value(found, "syringa_request_moves_total", **moves, fingerprint="other") == 1
    assert value(found, "syringa_router_requests_total", model_name="warm", prefix="known") == 2
    assert value(found, "syringa_router_requests_total", model_name="warm", prefix="new") == 1


async def test_metrics_show_an_ordinary_key_nothing_of_other_organizations() -> None:
    service = Service(warm=FakeEngine(), forbidden=FakeEngine())
    service.metrics.observe(accounting("warm"))
    service.caller = Caller(organization="acme", key="key_1", models=frozenset({"warm"}))
    async with service.client() as http:
        found = parsed((await http.get("/metrics")).content)
        names = {name for name, _ in found}
        states = {"model_loaded", "model_ready", "worker_hangs_total", "worker_crashes_total", "replicas"}
        assert names == {"syringa_" + name for name in (*states, "build_info")}
        assert {dict(labels).get("model_name", "warm") for _, labels in found} == {"warm"}
        service.keys.single_organization = True  # there are no other organizations
        assert "syringa_num_requests_running" in (await http.get("/metrics")).text
        service.keys.single_organization = False
        service.caller = Caller(organization="ops", key="key_2", admin=True)
        assert "syringa_time_to_first_token_seconds" in (await http.get("/metrics")).text


async def test_metrics_leave_out_statistics_of_engines_that_do_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "STATS_SECONDS", 0.01)
    cold = SilentEngine()  # a request for its statistics would hang
    cold.ready = False
    service = Service(
        "gone", warm=FakeEngine(), hung=SilentEngine(), dead=SilentEngine(EngineUnavailable("died")), cold=cold
    )
    async with service.client() as http:
        found = parsed((await http.get("/metrics")).content)
    loaded = {dict(labels)["model_name"]: each for (name, labels), each in found.items() if "model_loaded" in name}
    assert loaded == {"warm": 1, "hung": 1, "dead": 1, "cold": 0, "gone": 0}
    assert value(found, "syringa_model_ready", model_name="cold") == 0
    assert value(found, "syringa_worker_hangs_total", model_name="hung") == 2
    assert value(found, "syringa_worker_crashes_total", model_name="hung") == 1
    assert [dict(labels) for name, labels in found if name == "syringa_num_requests_running"] == [
        {"model_name": "warm"}
    ]


async def test_concurrent_scrapes_share_one_rendering() -> None:
    class Slow(FakeEngine):
        asked = 0

        async def stats(self) -> EngineStats:
            self.asked += 1
            await answers.wait()
            return EngineStats()

    engine, answers = Slow(), asyncio.Event()
    async with Service(warm=engine).client() as http:
        asking = [asyncio.create_task(http.get("/metrics")) for _ in range(20)]
        assert await eventually(lambda: engine.asked == 1)
        await settle()  # until all of them wait
        asking[0].cancel()
        answers.set()
        got = await asyncio.gather(*asking[1:])
        assert engine.asked == 1
        assert {answer.status_code for answer in got} == {200}
        assert (await http.get("/metrics")).status_code == 200
        assert engine.asked == 2


async def test_status_reports_the_requested_window() -> None:
    service = Service(warm=FakeEngine())
    async with service.client() as http:
        report = (await http.get("/status", params={"window": "1h"})).json()
        assert report["window_secs"] == 3600
        assert report["models"] == [
            {
                "id": "warm",
                "name": "Warm",
                "tps": None,
                "ttfb_seconds": None,
                "uptime_pct": None,
                "ready": True,
                "replicas": {},
            }
        ]
        assert (await http.get("/status")).json()["window"] == "5m"
        with pytest.raises(InvalidRequest):
            await http.get("/status", params={"window": "2h"})
    assert service.asked == [1e9 - 3600, 1e9 - 300]
