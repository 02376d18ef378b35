from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from syringa.errors import StoreUnavailable
from syringa.service.series.figures import decode_figures
from syringa.service.series.recorder import INTERVAL, KEEP_SECONDS, MAX_PENDING, SeriesRecorder
from syringa.service.series.report import plan_range, report
from syringa.store import SeriesRow, Store
from syringa.types import EngineStats
from tests.service.series.test_figures import accounting
from tests.store.helpers import Clock, read

DAY = 86_400


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = clock.now // 900 * 900
    return clock


@pytest.fixture
async def store(database: str, clock: Clock) -> AsyncIterator[Store]:
    async with Store(database, clock=clock) as opened:
        await opened.open()
        yield opened


async def rows(store: Store) -> list[SeriesRow]:
    found: list[SeriesRow] = await read(store).series.read(0, 2**60)
    return sorted(found, key=lambda each: (each.start, each.model, each.source))


async def totals(store: Store, clock: Clock, seconds: int, **more: Any) -> dict[str, Any]:
    """Return the report of a range, of which all that was counted is part."""
    span = plan_range(clock.now + INTERVAL + 6, seconds, **more)
    return report(await read(store).series.read(span.start, span.end), span)


async def test_interval_is_stored_when_it_is_over(store: Store, clock: Clock) -> None:
    recorder = SeriesRecorder(store, "a", clock=clock)
    recorder.observe(accounting())
    recorder.observe(accounting(model="n"))
    await recorder.flush()
    assert await rows(store) == []
    clock.now += INTERVAL
    recorder.observe(accounting(output=50))
    await recorder.flush()
    assert [(each.start, each.model, each.source) for each in await rows(store)] == [
        (int(clock.now) - INTERVAL, "m", "a"),
        (int(clock.now) - INTERVAL, "n", "a"),
    ]
    clock.now += INTERVAL
    await recorder.flush()
    assert [decode_figures(each.figures).output_tokens for each in await rows(store)] == [5, 5, 50]
    clock.now += 100 * INTERVAL
    await recorder.flush()
    assert len(await rows(store)) == 3  # nothing is stored while nothing happens


async def test_processes_and_servers_add_up(store: Store, clock: Clock) -> None:
    recorders = [SeriesRecorder(store, source, f"{source}/engines", clock) for source in ("a", "b", "c")]
    for recorder in recorders:

        async def read_stats() -> Mapping[str, EngineStats]:
            return {"m": EngineStats(running=2, blocks_total=10, blocks_free=5, block_size=16)}

        recorder.read_stats = read_stats
        recorder.observe(accounting())
        await recorder.sample()
        clock.now += 5
        await recorder.sample()
        clock.now -= 5
    clock.now += INTERVAL
    for recorder in recorders:
        await recorder.flush()
    (model,) = (await totals(store, clock, 60))["models"]
    assert model["totals"]["ok"] == 3
    assert max(model["running"]) == 6.0
    assert max(model["running_max"]) == 6
    assert max(model["kv_usage"]) == 0.5


async def test_servers_of_one_cluster_sample_the_same_engines_once(store: Store, clock: Clock) -> None:
    async def read_stats() -> Mapping[str, EngineStats]:
        return {"m": EngineStats(running=4)}

    recorders = [SeriesRecorder(store, source, "cluster", clock) for source in ("a", "b")]
    for recorder in recorders:
        recorder.read_stats = read_stats
        await recorder.sample()
    clock.now += INTERVAL
    for recorder in recorders:
        await recorder.flush()
    assert max((await totals(store, clock, 60))["models"][0]["running_max"]) == 4


async def test_counters_from_before_the_first_sample_do_not_count(store: Store, clock: Clock) -> None:
    counted = iter([1000, 1100, None, 1300, 50])
    recorder = SeriesRecorder(store, "a", "engines", clock)

    async def read_stats() -> Mapping[str, EngineStats]:
        tokens = next(counted)
        return {} if tokens is None else {"m": EngineStats(running=1, output_tokens=tokens)}

    recorder.read_stats = read_stats
    for _ in range(5):
        await recorder.sample()
        clock.now += INTERVAL
    await recorder.flush()
    generated = [decode_figures(each.figures).generated_tokens for each in await rows(store)]
    assert generated == [0, 100, 200, 50]  # one sample is missing, and the model was loaded again


async def test_engines_are_sampled_by_one_process_only(store: Store, clock: Clock) -> None:
    recorder = SeriesRecorder(store, "a", None, clock)

    async def read_stats() -> Mapping[str, EngineStats]:
        raise AssertionError

    recorder.read_stats = read_stats
    await recorder.sample()


async def test_figures_of_30_days_are_kept_at_coarser_resolution(store: Store, clock: Clock) -> None:
    recorder = SeriesRecorder(store, "a", "engines", clock)
    began = clock.now
    for age in (29 * DAY, 29 * DAY - 30, 3 * DAY, DAY, DAY - 30, 60):
        clock.now = began - age
        recorder.observe(accounting())
    clock.now = began + INTERVAL
    await recorder.flush()
    await recorder.maintain()
    assert [each.resolution for each in await rows(store)] == [900, 900, 60, 10]
    await recorder.maintain()
    assert [each.resolution for each in await rows(store)] == [900, 900, 60, 10]
    for seconds, expected in ((300, 1), (2 * DAY, 3), (30 * DAY, 6)):
        assert (await totals(store, clock, seconds))["all"]["totals"]["ok"] == expected
    clock.now += 2 * DAY
    await recorder.maintain()
    assert sum(decode_figures(each.figures).ok for each in await rows(store)) == 4
    clock.now += KEEP_SECONDS
    await recorder.maintain()
    assert await rows(store) == []


async def test_figures_wait_for_a_database_that_is_not_available(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SeriesRecorder(store, "a", clock=clock)
    recorder.observe(accounting())
    clock.now += INTERVAL

    async def fail(query: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as changed:
        changed.setattr(store, "write", fail)
        with pytest.raises(StoreUnavailable):
            await recorder.flush()
    await recorder.flush()
    assert len(await rows(store)) == 1


async def test_intervals_that_end_during_a_write_are_kept(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.service.series.recorder.MAX_PENDING", 2)
    recorder = SeriesRecorder(store, "a", clock=clock)

    def end_intervals(count: int) -> None:
        for _ in range(count):
            recorder.observe(accounting())
            clock.now += INTERVAL

    end_intervals(2)
    write = store.write

    async def write_slowly(query: Any) -> None:
        end_intervals(2)  # which push the oldest out
        recorder.observe(accounting())
        await write(query)

    with monkeypatch.context() as changed:
        changed.setattr(store, "write", write_slowly)
        await recorder.flush()
    await recorder.flush()
    assert len(await rows(store)) == 4


async def test_recording_creates_no_database(tmp_path: Any, clock: Clock) -> None:
    file = tmp_path / "syringa.db"
    async with Store(str(file), clock=clock) as store:
        recorder = SeriesRecorder(store, "a", "engines", clock)
        for _ in range(MAX_PENDING + 5):
            recorder.observe(accounting())
            clock.now += INTERVAL
        await recorder.flush()
        await recorder.maintain()
        assert not file.exists()
        await store.open()
        await recorder.flush()
        assert len(await rows(store)) == MAX_PENDING  # the oldest are dropped


async def test_closing_stores_the_current_interval(store: Store, clock: Clock) -> None:
    recorder = SeriesRecorder(store, "a", clock=clock)
    recorder.start()
    recorder.count_refused(401)
    await recorder.close()
    (row,) = await rows(store)
    assert (row.model, decode_figures(row.figures).errors) == ("", {"unauthorized": 1})
