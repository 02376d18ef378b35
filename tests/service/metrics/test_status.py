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


def usage(model: str = "m", **given: Any) -> ModelUsage:
    default = {"ok": 3, "failed": 1, "later_tokens": 90, "later_seconds": 4.5, "first_token_seconds": 0.25}
    return ModelUsage(**({"model": model, "last_at": NOON} | default | given))


class Book:
    """A database that can be away or slow, and a clock."""

    def __init__(self, *rows: ModelUsage) -> None:
        self.rows = list(rows)
        self.now = NOON
        self.asked: list[float] = []
        self.fail: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.models = [("m", "The model")]
        self.status = ModelStatus(self.read, lambda: self.models, lambda: self.now, patience=30)

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

    async def figures(self, window: str | None = None) -> tuple[Any, Any, Any]:
        (model,) = (await self.report(window))["models"]
        return model["tps"], model["ttfb_seconds"], model["uptime_pct"]


async def turns() -> None:
    """As often as anything here takes."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_shape() -> None:
    assert await Book(usage()).report() == {
        "updated_at": "2026-01-31T12:00:00Z",
        "window": "5m",
        "window_secs": 300,
        "stale": False,
        "models": [{"id": "m", "name": "The model", "tps": 20.0, "ttfb_seconds": 0.25, "uptime_pct": 75.0}],
    }


@pytest.mark.parametrize(
    ("window", "seconds"), [("5m", 300), ("1h", 3600), ("24h", 86_400), ("30d", 2_592_000), (None, 300)]
)
async def test_a_window_is_asked_for_by_its_length(window: str | None, seconds: int) -> None:
    book = Book(usage())
    report = await book.report(window)
    assert (report["window"], report["window_secs"]) == (window or "5m", seconds)
    assert book.asked == [NOON - seconds]


def test_the_windows_are_the_published_ones() -> None:
    assert list(status.WINDOWS) == STATUS_WINDOWS


@pytest.mark.parametrize("window", ["1m", "5M", "300", "5m ", "x" * 10_000])
async def test_another_window_is_refused(window: str) -> None:
    book = Book(usage())
    with pytest.raises(InvalidRequest, match=r"5m, 1h, 24h, 30d") as refusal:
        await book.status.report(window)
    assert refusal.value.param == "window"
    assert len(refusal.value.message) < 120
    assert book.asked == []


@pytest.mark.parametrize(
    ("given", "figures"),
    [
        ({"ok": 0, "failed": 0, "later_tokens": 0, "later_seconds": 0.0, "first_token_seconds": None}, (None,) * 3),
        ({"ok": 0, "failed": 4, "later_tokens": 0, "first_token_seconds": None}, (None, None, 0.0)),
        ({"ok": 1, "failed": 0, "later_tokens": 0, "later_seconds": 0.0}, (None, 0.25, 100.0)),
        ({"ok": 1, "failed": 0, "later_seconds": 0.0}, (None, 0.25, 100.0)),
        ({"ok": 999_999, "failed": 1}, (20.0, 0.25, 99.999)),
    ],
)
async def test_what_is_not_known_is_null(given: dict[str, Any], figures: tuple[Any, ...]) -> None:
    assert await Book(usage(**given)).figures() == figures


async def test_every_configured_model_is_listed_and_no_other() -> None:
    book = Book(usage("gone"), usage("b", ok=1, failed=0))
    book.models = [("a", "A"), ("b", "B")]
    models = (await book.report())["models"]
    assert [(each["id"], each["name"], each["uptime_pct"]) for each in models] == [("a", "A", None), ("b", "B", 100.0)]
    book.models = [("b", "B"), ("c", "C")]  # known at once, although the sums are still kept
    assert [each["id"] for each in (await book.report())["models"]] == ["b", "c"]
    assert len(book.asked) == 1


@pytest.mark.parametrize("window", status.WINDOWS)
async def test_sums_are_kept_for_a_while(window: str) -> None:
    book, keep = Book(usage()), status.WINDOWS[window].keep
    await book.report(window)
    book.rows = [usage(failed=0)]
    book.now += keep - 0.01
    report = await book.report(window)
    assert (report["updated_at"], report["models"][0]["uptime_pct"]) == ("2026-01-31T12:00:00Z", 75.0)
    assert len(book.asked) == 1
    book.now += 0.02
    assert (await book.report(window))["models"][0]["uptime_pct"] == 100.0
    assert len(book.asked) == 2


async def test_a_clock_that_is_set_back_keeps_nothing_for_longer() -> None:
    book = Book(usage())
    await book.report()
    book.now -= 3600
    assert (await book.report())["updated_at"] == "2026-01-31T11:00:00Z"


async def test_many_who_ask_at_once_are_one_query() -> None:
    book = Book(usage())
    book.open.clear()
    asking = [asyncio.create_task(book.report("1h")) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()  # the one that began the query goes away
    await asyncio.sleep(0)
    book.open.set()
    reports = await asyncio.gather(*asking[1:])
    assert len(book.asked) == 1
    assert not any(report["stale"] for report in reports)


async def test_windows_do_not_take_all_readers() -> None:
    book = Book(usage())
    book.open.clear()
    asking = [asyncio.create_task(book.report(window)) for window in STATUS_WINDOWS]
    await turns()
    assert len(book.asked) == status.AT_ONCE < len(STATUS_WINDOWS)
    book.open.set()
    await asyncio.gather(*asking)
    assert len(book.asked) == len(STATUS_WINDOWS)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ValueError("a defect")])
async def test_a_database_that_is_away_makes_the_report_stale(error: Exception) -> None:
    book = Book(usage())
    await book.report()
    book.fail, book.now = error, book.now + 10
    report = await book.report()
    assert (report["stale"], report["updated_at"]) == (True, "2026-01-31T12:00:00Z")
    assert report["models"][0]["uptime_pct"] == 75.0
    await book.report()
    assert len(book.asked) == 2  # it is not asked again at once
    book.fail, book.now = None, book.now + 10
    report = await book.report()
    assert (report["stale"], report["updated_at"]) == (False, "2026-01-31T12:00:20Z")


async def test_a_long_window_is_tried_again_soon_after_a_failure() -> None:
    book = Book(usage())
    book.fail = StoreUnavailable("away")
    assert (await book.report("30d"))["stale"]
    book.fail, book.now = None, book.now + status.RETRY_SECONDS
    assert not (await book.report("30d"))["stale"]


async def test_without_any_figures_the_models_are_listed_all_the_same() -> None:
    book = Book()
    book.fail = StoreUnavailable("away")
    report = await book.report()
    assert (report["stale"], report["updated_at"]) == (True, "2026-01-31T12:00:00Z")
    assert report["models"] == [{"id": "m", "name": "The model", "tps": None, "ttfb_seconds": None, "uptime_pct": None}]


async def test_nobody_waits_for_a_database_that_hangs_and_it_is_not_asked_twice() -> None:
    book = Book(usage())
    book.open.clear()
    book.status._patience = 0.02
    assert (await book.report())["stale"]
    book.status._patience = 3600  # the next one must not use it up
    book.now += 100
    assert (await asyncio.wait_for(book.report(), 30))["stale"]
    assert len(book.asked) == 1
    book.open.set()
    await turns()
    report = await book.report()
    assert (report["stale"], report["updated_at"]) == (False, "2026-01-31T12:00:00Z")


async def test_the_figures_of_real_records(database: str) -> None:
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
        {"id": "m", "name": "M", "tps": 10.0, "ttfb_seconds": 0.2, "uptime_pct": 66.666},
        {"id": "idle", "name": "Idle", "tps": None, "ttfb_seconds": None, "uptime_pct": None},
    ]
    assert long["models"][0]["uptime_pct"] == 40.0
