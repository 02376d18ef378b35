from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from starlette.routing import Router

from syringa.engine.interface import Engine
from syringa.errors import EngineUnavailable, InvalidRequest, NotFound
from syringa.http.routes import metrics as observing
from syringa.http.routes.metrics import Observing
from syringa.service.metrics.metrics import Metrics
from syringa.service.metrics.status import Status
from syringa.store.records import ModelUsage
from syringa.types import EngineStats
from tests.fake_engine import FakeEngine
from tests.service.metrics.test_metrics import account, parsed, value


class Quiet(FakeEngine):
    """Never says how it does, or says that it cannot."""

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
            raise NotFound(f"{model} was removed meanwhile")
        return self.engines[model]


class Service:
    """The two endpoints alone, over engines by name."""

    def __init__(self, *gone: str, **engines: FakeEngine) -> None:
        self.metrics = Metrics("syringa_")
        self.asked: list[float] = []
        models = [(id, id.title()) for id in (*engines, *gone)]
        status = Status(self.read, lambda: models, lambda: 1e9)
        self.routes = Observing(self.metrics, status, Engines(**engines), lambda: models).routes()

    async def read(self, since: float) -> Sequence[ModelUsage]:
        self.asked.append(since)
        return []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(Router(self.routes)), base_url="http://test")


async def test_metrics_are_text_for_prometheus() -> None:
    service = Service(warm=FakeEngine())
    service.metrics(account("warm"))
    async with service.client() as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(answer.content)
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="warm") == 1
    assert value(found, "syringa_num_requests_running", model_name="warm") == 0


async def test_an_engine_that_does_not_answer_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "STATS_SECONDS", 0.01)
    cold = Quiet()  # being asked would hang
    cold.ready = False
    service = Service("gone", warm=FakeEngine(), hung=Quiet(), dead=Quiet(EngineUnavailable("died")), cold=cold)
    async with service.client() as http:
        found = parsed((await http.get("/metrics")).content)
    loaded = {dict(labels)["model_name"]: each for (name, labels), each in found.items() if "model_loaded" in name}
    assert loaded == {"warm": 1, "cold": 0}
    assert [dict(labels) for name, labels in found if name == "syringa_num_requests_running"] == [
        {"model_name": "warm"}
    ]


async def test_who_asks_meanwhile_gets_the_same_and_who_leaves_takes_nothing_along() -> None:
    class Slow(FakeEngine):
        asked = 0

        async def stats(self) -> EngineStats:
            self.asked += 1
            await answers.wait()
            return EngineStats()

    engine, answers = Slow(), asyncio.Event()
    async with Service(warm=engine).client() as http:
        asking = [asyncio.create_task(http.get("/metrics")) for _ in range(20)]
        await asyncio.sleep(0.5)  # all of them wait by then
        asking[0].cancel()
        answers.set()
        got = await asyncio.gather(*asking[1:])
        assert engine.asked == 1
        assert {answer.status_code for answer in got} == {200}
        assert (await http.get("/metrics")).status_code == 200
        assert engine.asked == 2


async def test_status_of_a_window() -> None:
    service = Service(warm=FakeEngine())
    async with service.client() as http:
        report = (await http.get("/status", params={"window": "1h"})).json()
        assert report["window_secs"] == 3600
        assert report["models"] == [
            {"id": "warm", "name": "Warm", "tps": None, "ttfb_seconds": None, "uptime_pct": None}
        ]
        assert (await http.get("/status")).json()["window"] == "5m"
        with pytest.raises(InvalidRequest):
            await http.get("/status", params={"window": "2h"})
    assert service.asked == [1e9 - 3600, 1e9 - 300]
