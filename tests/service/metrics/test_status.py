from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest

from syringa.api.openapi.operations import STATUS, STATUS_WINDOWS
from syringa.errors import InvalidRequest, StoreUnavailable
from syringa.service.metrics import status
from syringa.service.metrics.status import ModelStatus
from syringa.store import Store
from syringa.store.records import ModelUsage, UsageRecord
from tests.store.helpers import read, write

NOON = 1_769_860_800.0  # 2026-01-31T12:00:00Z
SCHEMA: Any = STATUS.response
FLEET = {
    "nodes": {"ready": 2, "lost": 1},
    "pools": {"active": 1},
    "evictions": {"pool_closed": 2},
    "recovery": {"count": 1, "mean_seconds": 4.5},
    "moves": {"drain": 1, "crash": 0, "silence": 0, "balance": 0},
    "router": {"requests": 0, "hit_share": None},
}


def usage(model: str = "m", **given: Any) -> ModelUsage:
    default = {"ok": 3, "failed": 1, "decode_tokens": 90, "decode_seconds": 4.5, "first_token_seconds": 0.25}
    return ModelUsage(**({"model": model, "last_at": NOON} | default | given))


class FakeUsage:
    """A source of usage that can be unavailable or slow, and a clock."""

    def __init__(self, *rows: ModelUsage) -> None:
        self.rows = list(rows)
        self.now = NOON
        self.asked: list[float] = []
        self.fail: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.models = [("m", "The model")]
        self.status = ModelStatus(self.read, lambda: self.models, lambda: self.now, max_wait=30, fleet=lambda: FLEET)

    async def read(self, since: float) -> list[ModelUsage]:
        self.asked.append(since)
        await self.open.wait()
        if self.fail is not None:
            raise self.fail
        return self.rows

    async def report(self, window: str | None = None) -> dict[str, Any]:
        report = await self.status.report(window)
        checker = jsonschema.FormatChecker(formats=["date-time"])
        jsonschema.Draft202012Validator(SCHEMA, format_checker=checker).validate(report)
        return report

    async def statistics(self, window: str | None = None) -> tuple[Any, Any, Any]:
        (model,) = (await self.report(window))["models"]
        return model["tps"], model["ttfb_seconds"], model["uptime_pct"]


async def run_pending() -> None:
    """Let all pending callbacks run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_report_format() -> None:
    assert await FakeUsage(usage()).report() == {
        "updated_at": "2026-01-31T12:00:00Z",
        "window": "5m",
        "window_secs": 300,
        "stale": False,
        "models": [
            {
                "id": "m",
                "name": "The model",
                "tps": 20.0,
                "ttfb_seconds": 0.25,
                "uptime_pct": 75.0,
                "ready": True,
                "replicas": {},
            }
        ],
        **FLEET,
    }


@pytest.mark.parametrize(
    ("window", "seconds"), [("5m", 300), ("1h", 3600), ("24h", 86_400), ("30d", 2_592_000), (None, 300)]
)
async def test_window_length(window: str | None, seconds: int) -> None:
    source = FakeUsage(usage())
    report = await source.report(window)
    assert (report["window"], report["window_secs"]) == (window or "5m", seconds)
    assert source.asked == [NOON - seconds]


def test_windows_match_openapi() -> None:
    assert list(status.WINDOWS) == STATUS_WINDOWS


@pytest.mark.parametrize("window", ["1m", "5M", "300", "5m ", "x" * 10_000])
async def test_unknown_window_is_refused(window: str) -> None:
    source = FakeUsage(usage())
    with pytest.raises(InvalidRequest, match=r"5m, 1h, 24h, 30d") as refusal:
        await source.status.report(window)
    assert refusal.value.param == "window"
    assert len(refusal.value.message) < 120
    assert source.asked == []


@pytest.mark.parametrize(
    ("given", "statistics"),
    [
        ({"ok": 0, "failed": 0, "decode_tokens": 0, "decode_seconds": 0.0, "first_token_seconds": None}, (None,) * 3),
        ({"ok": 0, "failed": 4, "decode_tokens": 0, "first_token_seconds": None}, (None, None, 0.0)),
        ({"ok": 1, "failed": 0, "decode_tokens": 0, "decode_seconds": 0.0}, (None, 0.25, 100.0)),
        ({"ok": 1, "failed": 0, "decode_seconds": 0.0}, (None, 0.25, 100.0)),
        ({"ok": 999_999, "failed": 1}, (20.0, 0.25, 99.999)),
    ],
)
async def test_unknown_statistics_are_null(given: dict[str, Any], statistics: tuple[Any, ...]) -> None:
    assert await FakeUsage(usage(**given)).statistics() == statistics


async def test_report_lists_configured_models() -> None:
    source = FakeUsage(usage("gone"), usage("b", ok=1, failed=0))
    source.models = [("a", "A"), ("b", "B")]
    models = (await source.report())["models"]
    assert [(each["id"], each["name"], each["uptime_pct"]) for each in models] == [("a", "A", None), ("b", "B", 100.0)]
    source.models = [("b", "B"), ("c", "C")]  # known at once, although statistics are cached
    assert [each["id"] for each in (await source.report())["models"]] == ["b", "c"]
    assert len(source.asked) == 1


@pytest.mark.parametrize("window", status.WINDOWS)
async def test_statistics_are_cached(window: str) -> None:
    source, keep = FakeUsage(usage()), status.WINDOWS[window].keep
    await source.report(window)
    source.rows = [usage(failed=0)]
    source.now += keep - 0.01
    report = await source.report(window)
    assert (report["updated_at"], report["models"][0]["uptime_pct"]) == ("2026-01-31T12:00:00Z", 75.0)
    assert len(source.asked) == 1
    source.now += 0.02
    assert (await source.report(window))["models"][0]["uptime_pct"] == 100.0
    assert len(source.asked) == 2


async def test_cache_expires_when_clock_is_set_back() -> None:
    source = FakeUsage(usage())
    await source.report()
    source.now -= 3600
    assert (await source.report())["updated_at"] == "2026-01-31T11:00:00Z"


async def test_concurrent_reports_share_one_query() -> None:
    source = FakeUsage(usage())
    source.open.clear()
    asking = [asyncio.create_task(source.report("1h")) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()  # the request that started the query disconnects
    await asyncio.sleep(0)
    source.open.set()
    reports = await asyncio.gather(*asking[1:])
    assert len(source.asked) == 1
    assert not any(report["stale"] for report in reports)


async def test_concurrent_queries_are_limited() -> None:
    source = FakeUsage(usage())
    source.open.clear()
    asking = [asyncio.create_task(source.report(window)) for window in STATUS_WINDOWS]
    await run_pending()
    assert len(source.asked) == status.MAX_QUERIES < len(STATUS_WINDOWS)
    source.open.set()
    await asyncio.gather(*asking)
    assert len(source.asked) == len(STATUS_WINDOWS)


@pytest.mark.parametrize("error", [StoreUnavailable("unavailable"), ValueError("a defect")])
async def test_report_is_stale_while_database_is_unavailable(error: Exception) -> None:
    source = FakeUsage(usage())
    await source.report()
    source.fail, source.now = error, source.now + 10
    report = await source.report()
    assert (report["stale"], report["updated_at"]) == (True, "2026-01-31T12:00:00Z")
    assert report["models"][0]["uptime_pct"] == 75.0
    await source.report()
    assert len(source.asked) == 2  # not queried again at once
    source.fail, source.now = None, source.now + 10
    report = await source.report()
    assert (report["stale"], report["updated_at"]) == (False, "2026-01-31T12:00:20Z")


async def test_failed_query_is_retried_soon() -> None:
    source = FakeUsage(usage())
    source.fail = StoreUnavailable("unavailable")
    assert (await source.report("30d"))["stale"]
    source.fail, source.now = None, source.now + status.RETRY_SECONDS
    assert not (await source.report("30d"))["stale"]


async def test_models_are_listed_without_statistics() -> None:
    source = FakeUsage()
    source.fail = StoreUnavailable("unavailable")
    report = await source.report()
    assert (report["stale"], report["updated_at"]) == (True, "2026-01-31T12:00:00Z")
    assert report["models"] == [
        {
            "id": "m",
            "name": "The model",
            "tps": None,
            "ttfb_seconds": None,
            "uptime_pct": None,
            "ready": True,
            "replicas": {},
        }
    ]


async def test_slow_query_is_awaited_only_once() -> None:
    source = FakeUsage(usage())
    source.open.clear()
    source.status._max_wait = 0.02
    assert (await source.report())["stale"]
    source.status._max_wait = 3600  # the next request must not wait for it
    source.now += 100
    assert (await asyncio.wait_for(source.report(), 30))["stale"]
    assert len(source.asked) == 1
    source.open.set()
    await run_pending()
    report = await source.report()
    assert (report["stale"], report["updated_at"]) == (False, "2026-01-31T12:00:00Z")


async def test_statistics_of_real_records(database: str) -> None:
    common: Any = {"model": "m", "endpoint": "/v1/completions", "status": 200, "outcome": "ok"}
    quick = common | {"output_tokens": 11, "first_token_seconds": 0.1, "total_seconds": 0.6}
    slow = common | {"output_tokens": 11, "first_token_seconds": 0.3, "total_seconds": 1.8}
    rows = [
        UsageRecord(at=NOON - 10, **quick),
        UsageRecord(at=NOON - 20, **slow),
        UsageRecord(at=NOON - 30, **common | {"outcome": "failed", "status": 500}),
        UsageRecord(at=NOON - 40, **common | {"outcome": "refused", "status": 400, "requests": 7}),
        UsageRecord(at=NOON - 50, **quick | {"outcome": "cancelled", "status": 499, "first_token_seconds": 9.0}),
        UsageRecord(at=NOON - 1000, **common | {"outcome": "failed", "status": 503, "requests": 2}),
    ]
    async with Store(database) as store:
        await write(store).usage.add(rows)
        status = ModelStatus(read(store).usage.by_model, lambda: [("m", "M"), ("idle", "Idle")], lambda: NOON)
        short, long = await asyncio.gather(status.report("5m"), status.report("1h"))
    assert short["models"] == [
        {"id": "m", "name": "M", "tps": 10.0, "ttfb_seconds": 0.2, "uptime_pct": 66.666, "ready": True}
        | {"replicas": {}},
        {
            "id": "idle",
            "name": "Idle",
            "tps": None,
            "ttfb_seconds": None,
            "uptime_pct": None,
            "ready": True,
            "replicas": {},
        },
    ]
    assert long["models"][0]["uptime_pct"] == 40.0
