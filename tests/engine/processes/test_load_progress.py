"""How far a model is in being loaded, from the page of its worker to the states that API servers get."""

from __future__ import annotations

import pytest

from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.engine.processes.health import HealthPage
from syringa.engine.processes.worker_process import PROGRESS_SECONDS
from syringa.types import LoadProgress
from tests.engine.processes.fleet_harness import FleetHarness, launches, model
from tests.engine.processes.manager_harness import ManagerHarness
from tests.engine.processes.stub_worker import INFO
from tests.engine.processes.test_replica_host import HostHarness

STARTING, QUEUED = LoadProgress("starting"), LoadProgress("queued")


def loading(harness: ManagerHarness, name: str = "a") -> LoadProgress | None:
    state = harness.state(name)
    assert state is not None
    return state.loading


def test_health_page_has_the_phase_and_its_part_that_is_done() -> None:
    page = HealthPage()
    assert page.loading() == STARTING
    page.report_loading("weights")
    assert page.loading() == LoadProgress("weights")  # how many there are is not known
    seen = []
    for done in range(8):
        page.report_loading("weights", done, 7)
        seen.append(page.loading().fraction)
    assert seen == [0.0, 0.14, 0.28, 0.42, 0.57, 0.71, 0.85, 1.0]  # 1 at the end only
    page.report_loading("warmup", 1, 4)
    assert page.loading() == LoadProgress("warmup", 0.25)


def test_health_page_never_goes_back() -> None:
    page = HealthPage()
    page.report_loading("weights", 5, 10)
    for phase, done, total in (("weights", 4, 10), ("weights", 0, 0), ("starting", 0, 0)):
        page.report_loading(phase, done, total)  # type: ignore[arg-type]
        assert page.loading() == LoadProgress("weights", 0.5)
    page.report_loading("weights", 12, 10)
    assert page.loading().fraction == 1.0


def test_health_page_counts_every_report_as_progress() -> None:
    page = HealthPage(clock=lambda: 7.0)
    before = page.read().step
    page.report_loading("weights", 5, 10)
    page.report_loading("weights", 5, 10)
    assert page.read().step == before + 2  # or the watchdog would end a worker with many small parts


def test_manager_publishes_progress_but_not_every_report(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.acquire("a")
    (process,) = harness.processes
    assert [state.loading for state in harness.published] == [QUEUED, STARTING]
    process.health.report_loading("weights", 0, 1000)
    harness.advance(0)
    for done in range(1, 1001):
        process.health.report_loading("weights", done, 1000)
        harness.advance(PROGRESS_SECONDS / 50)
    harness.advance(PROGRESS_SECONDS)
    seen = [state.loading.fraction for state in harness.published[2:] if state.loading is not None]
    assert all(each is not None for each in seen)
    assert seen == sorted(set(seen), key=lambda each: each or 0.0)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert 15 <= len(seen) <= 22
    process.health.report_loading("warmup")
    harness.advance(0)  # the beginning of a phase is published at once
    assert loading(harness) == LoadProgress("warmup")
    assert {state.loading_since for state in harness.published} == {1000.0}


def test_manager_has_no_progress_of_a_loaded_model_and_begins_anew_when_it_is_loaded_again(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.acquire("a", idle_timeout=60)
    process = harness.processes[-1]
    process.health.report_loading("weights", 9, 10)
    harness.advance(1)
    process.send(protocol.Ready(INFO))
    harness.advance(0)
    assert harness.status("a") == "loaded"
    assert loading(harness) is None
    harness.stats(process, idle_seconds=1)
    harness.advance(100)
    harness.stats(process, idle_seconds=100)
    harness.advance(1)
    process.end()
    harness.advance(0)
    assert harness.status("a") == "cold"
    assert loading(harness) is None
    harness.advance(99)
    harness.acquire("a")
    assert loading(harness) == STARTING
    assert harness.published[-1].loading_since == harness.now


@pytest.mark.parametrize("status", [managed_process.EXIT_CANNOT_START, managed_process.EXIT_NO_MEMORY])
def test_manager_has_no_progress_of_a_model_that_could_not_be_loaded(folder: str, status: int) -> None:
    harness = ManagerHarness(folder)
    harness.acquire("a")
    harness.processes[-1].health.report_loading("weights", 9, 10)
    harness.advance(1)
    assert loading(harness) == LoadProgress("weights", 0.9)
    harness.processes[-1].end(status)
    harness.run_for(1)
    assert harness.status("a") == "failed"
    assert loading(harness) is None
    harness.free *= 2
    harness.advance(1000)
    harness.acquire("a")
    assert loading(harness) in (STARTING, QUEUED)


def test_manager_begins_anew_with_the_worker_that_is_started_after_a_crash(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.acquire("a")
    harness.processes[-1].health.report_loading("weights", 9, 10)
    harness.advance(1)
    harness.processes[-1].end(-9)
    harness.advance(0)
    assert harness.status("a") == "loading"
    assert loading(harness) == QUEUED
    harness.advance(60)
    assert loading(harness) == STARTING
    assert harness.published[-1].loading_since == 1000.0  # since it was asked for


def test_manager_reports_the_replica_that_is_ahead(folder: str) -> None:
    harness = ManagerHarness(folder)
    key = harness.acquire("a", replicas=(2, 2))
    harness.workers.add_replica(key)
    harness.advance(1)
    first, second = harness.processes
    first.health.report_loading("weights", 1, 10)
    second.health.report_loading("weights", 6, 10)
    harness.advance(1)
    assert loading(harness) == LoadProgress("weights", 0.6)


def test_replica_on_a_node_reports_its_progress(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.start()
    assert harness.host.status().loading == STARTING
    process.health.report_loading("weights", 3, 10)
    harness.now += 1
    harness.host.tick()
    assert harness.host.status().loading == LoadProgress("weights", 0.3)
    process.send(protocol.Ready(INFO, fingerprint="f", address="tcp:node-1.example:4000"))
    harness.host.tick()
    assert harness.host.status().phase == "ready"
    assert harness.host.status().loading is None
    harness.host.stop()


def test_fleet_manager_reports_the_progress_of_a_cluster_replica(folder: str) -> None:
    harness = FleetHarness(folder)
    key = harness.acquire(model())
    (launch,) = launches(harness)
    assert harness.state(key).loading == QUEUED
    since = harness.state(key).loading_since
    for phase, reported, shown in (
        ("fetching", None, LoadProgress("fetching")),
        ("loading", None, STARTING),  # a host of an older version
        ("loading", LoadProgress("weights", 0.42), LoadProgress("weights", 0.42)),
    ):
        harness.cluster.set(launch.id, phase=phase, loading=reported)
        harness.run_for(1)
        assert (harness.state(key).loading, harness.state(key).loading_since) == (shown, since)
    harness.cluster.load(launch.id)
    harness.run_for(1)
    assert (harness.state(key).status, harness.state(key).loading) == ("loaded", None)
