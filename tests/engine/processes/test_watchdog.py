from __future__ import annotations

import signal

import pytest

from syringa.engine.client import protocol
from syringa.engine.processes.control import Suspects, WorkerState
from syringa.engine.processes.health import MAX_FINGERPRINTS, HealthPage, WorkerHealth, WorkerPhase, create_page
from syringa.engine.processes.watchdog import WatchdogLimits, assess
from tests.engine.processes.manager_harness import FakeProcess, ManagerHarness
from tests.engine.processes.stub_worker import INFO

LIMITS = WatchdogLimits(heartbeat=10, step=60)


def health(beat: float, step: float | None = None, phase: WorkerPhase = "serving") -> WorkerHealth:
    return WorkerHealth(phase, beat, 1, step)


# The decision


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        (health(1000), "none"),
        (health(990), "none"),
        (health(989), "suspend"),
        (health(980), "suspend"),
        (health(979), "kill"),
        (health(1000, 940), "none"),
        (health(1000, 939), "suspend"),
        (health(1000, 880), "suspend"),
        (health(1000, 879), "kill"),
        (health(989, 879), "kill"),
        (health(900, 1000, "loading"), "none"),
        (health(899, 1000, "loading"), "suspend"),
        (health(799, 1000, "loading"), "kill"),
        (health(1000, 400, "loading"), "none"),
        (health(1000, 399, "loading"), "suspend"),
    ],
)
def test_assess_compares_heartbeat_and_step_with_their_limits(seen: WorkerHealth, action: str) -> None:
    assert assess(seen, LIMITS, watched_from=0, now=1000).action == action


def test_assess_ignores_what_was_before_the_watch_began() -> None:
    stale = health(0, 0)
    assert assess(stale, LIMITS, watched_from=990, now=1000).action == "none"
    assert assess(stale, LIMITS, watched_from=985, now=1000).action == "suspend"


def test_assess_has_no_limits_at_zero() -> None:
    assert assess(health(0, 0), WatchdogLimits(0, 0), watched_from=0, now=1e9).action == "none"


# The health page


def test_health_page_is_read_by_the_process_that_created_it() -> None:
    now = 5.0
    fd = create_page()
    reader, writer = HealthPage(fd), HealthPage(fd, lambda: now)
    assert reader.read() == WorkerHealth("loading", 0.0, 0, None)
    writer.beat()
    writer.set_phase("serving")
    now = 7.0
    writer.begin_step()
    assert reader.read() == WorkerHealth("serving", 5.0, 1, 7.0)
    writer.end_step()
    assert reader.read() == WorkerHealth("serving", 5.0, 1, None)
    one, two = bytes(16), bytes(range(16))
    writer.set_running([one, two, one, b"", two])
    assert reader.running() == [one, two]
    writer.set_running([number.to_bytes(16) for number in range(MAX_FINGERPRINTS + 5)])
    assert len(reader.running()) == MAX_FINGERPRINTS
    writer.set_running([])
    assert reader.running() == []


# The manager


def load(harness: ManagerHarness, **options: bool) -> FakeProcess:
    process = harness.load("a", **options)
    process.health.set_phase("serving")
    return process


@pytest.fixture
def harness(folder: str) -> ManagerHarness:
    return ManagerHarness(folder, heartbeat_timeout=10.0, step_timeout=60.0)


def last_state(harness: ManagerHarness) -> WorkerState:
    return harness.published[-1]


def test_manager_kills_and_restarts_worker_without_heartbeat(harness: ManagerHarness) -> None:
    process = load(harness, restart=True)
    harness.run_for(100, process)
    assert (harness.status("a"), last_state(harness).hangs) == ("loaded", 0)
    harness.run_for(10.5)
    assert harness.status("a") == "hanging"
    (replica,) = last_state(harness).replicas
    assert (replica.status, replica.address) == ("hanging", f"unix:{process.options.socket}")  # used if it responds
    assert (last_state(harness).hangs, process.signals) == (1, [])
    harness.run_for(10)
    assert process.signals == ["KILL"]
    process.end(-signal.SIGKILL)
    harness.advance(0.5)
    assert harness.status("a") == "loading"
    assert (last_state(harness).hangs, last_state(harness).crashes) == (1, 1)
    harness.run_for(1)
    assert len(harness.processes) == 2
    harness.processes[1].send(protocol.Ready(INFO))
    harness.run_for(1, harness.processes[1])
    assert harness.status("a") == "loaded"


def test_manager_uses_worker_that_responds_again(harness: ManagerHarness) -> None:
    process = load(harness)
    harness.run_for(12)
    assert harness.status("a") == "hanging"
    harness.run_for(1, process)
    assert harness.status("a") == "loaded"
    assert process.signals == []
    harness.run_for(12)
    assert last_state(harness).hangs == 2


def test_manager_kills_worker_whose_step_does_not_end(harness: ManagerHarness) -> None:
    process = load(harness)
    for _ in range(100):  # many short steps
        process.health.begin_step()
        harness.run_for(1, process)
    assert harness.status("a") == "loaded"
    harness.run_for(59.5, process)
    assert harness.status("a") == "hanging"
    harness.run_for(60, process)
    assert process.signals == ["KILL"]


def test_manager_does_not_evict_hanging_worker(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1, heartbeat_timeout=10.0)
    load(harness)
    harness.run_for(12)
    harness.acquire("b")
    assert harness.status("a") == "hanging"
    assert harness.status("b") == "loading"
    assert len(harness.processes) == 1


def test_manager_gives_a_fresh_interval_after_it_was_suspended(harness: ManagerHarness) -> None:
    process = load(harness)
    process.health.begin_step()
    harness.run_for(5, process)
    harness.advance(3600)
    assert harness.status("a") == "loaded"
    harness.run_for(9)
    assert harness.status("a") == "loaded"
    harness.run_for(2)
    assert harness.status("a") == "hanging"


def test_manager_kills_worker_that_stops_while_loading(harness: ManagerHarness) -> None:
    harness.acquire("a")
    (process,) = harness.processes
    harness.run_for(199.5)
    assert process.signals == []
    harness.run_for(2)
    assert process.signals == ["KILL"]
    process.end(-signal.SIGKILL)
    harness.advance(0.5)
    assert harness.status("a") == "loading"  # it is tried once more
    harness.run_for(1)
    harness.run_for(202)
    harness.processes[1].end(-signal.SIGKILL)
    harness.advance(0.5)
    assert harness.status("a") == "failed"
    assert last_state(harness).reason.startswith("its worker hung while loading: no heartbeat for 2")


def test_manager_reports_suspects_before_the_new_state(harness: ManagerHarness) -> None:
    process = load(harness, restart=True)
    process.health.set_running([b"1" * 16, b"2" * 16])
    del harness.reports[:]
    process.end(-signal.SIGSEGV)
    harness.advance(0.5)
    suspects, state = harness.reports
    assert isinstance(suspects, Suspects)
    assert suspects.levels == {b"1" * 16: 1, b"2" * 16: 1}
    assert isinstance(state, WorkerState)
    assert state.status == "loading"
    assert harness.workers.reports() == [suspects, state]  # for a new API server
    harness.workers.clear_suspect(suspects.key, b"1" * 16)
    harness.workers.clear_suspect(suspects.key, b"9" * 16)
    assert harness.reports[2:] == [Suspects(suspects.key, {b"2" * 16: 1})]
    harness.advance(601)
    assert Suspects(suspects.key, {}) in harness.reports


def test_manager_suspects_nothing_when_worker_exits_as_told(harness: ManagerHarness) -> None:
    process = load(harness)
    process.health.set_running([b"1" * 16])
    process.end(0)
    harness.advance(0.5)
    assert last_state(harness).crashes == 0
    assert not [report for report in harness.reports if isinstance(report, Suspects)]
