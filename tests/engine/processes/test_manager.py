from __future__ import annotations

import signal

import pytest

from syringa.engine.client import protocol
from syringa.engine.interface import ReplicaState
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import AcquireModel, WorkerState, worker_key
from syringa.engine.processes.handle import RECENT_SECONDS
from syringa.engine.processes.worker_process import UNLOAD_SECONDS
from syringa.engine.worker.options import WorkerOptions
from syringa.types import EngineStats, LoadProgress
from tests.engine.processes.manager_harness import GB, ManagerHarness, model_size, retire_message
from tests.engine.processes.stub_worker import INFO


def test_manager_loads_and_unloads_idle_model(folder: str) -> None:
    harness = ManagerHarness(folder)
    key = harness.acquire("a", idle_timeout=60)
    (process,) = harness.processes
    assert [state.status for state in harness.published] == ["loading", "loading"]
    process.send(protocol.Ready(INFO))
    harness.advance(0)
    address = f"unix:{process.options.socket}"
    ready = ReplicaState("a-1", "ready", address)
    assert harness.published[-1] == WorkerState(key, "loaded", replicas=[ready], idle_timeout=60)
    harness.stats(process, running=1)
    harness.advance(1000)
    assert retire_message(process) is None  # in use
    harness.stats(process, idle_seconds=59)
    harness.advance(0.9)
    assert retire_message(process) is None
    harness.advance(0.1)
    draining = ReplicaState("a-1", "draining", address, grace=UNLOAD_SECONDS)
    # Before the worker is asked.
    assert harness.published[-1] == WorkerState(key, "cold", replicas=[draining], idle_timeout=60)
    assert retire_message(process) == protocol.Retire(60, False)
    process.end()
    harness.advance(0)
    assert harness.published[-1] == WorkerState(key, "cold", idle_timeout=60)
    assert not harness.selector.get_map()


def test_manager_keeps_model_as_asked_until_it_is_loaded_again(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a", restart=True)
    key = worker_key(WorkerOptions(socket="", model="a"))
    harness.advance(1000)
    assert retire_message(process) is None
    harness.workers.keep(key, 0.001)
    assert harness.published[-1].idle_timeout == 0.001
    harness.stats(process, running=1)
    assert retire_message(process) is None  # in use
    harness.stats(process, idle_seconds=0)
    harness.advance(0.1)
    assert retire_message(process) == protocol.Retire(0.001, False)
    process.end()
    harness.advance(0)
    assert harness.status("a") == "cold"  # although it is preloaded
    harness.workers.keep("unknown", 5)
    process = harness.load("a", restart=True)
    harness.advance(1000)
    assert retire_message(process) is None


def test_manager_keeps_worker_that_declines_to_retire(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a", idle_timeout=60)
    harness.advance(61)
    assert retire_message(process)
    process.send(protocol.RetireDeclined(EngineStats(running=1)))
    harness.advance(0)
    assert harness.status("a") == "loaded"
    harness.stats(process, idle_seconds=0)
    harness.advance(59)
    assert retire_message(process) is None


def test_manager_restarts_worker_requested_while_unloading(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a", idle_timeout=60)
    harness.advance(61)
    harness.now += 0.01
    harness.acquire("a", idle_timeout=60)
    assert harness.status("a") == "loading"
    process.end()
    harness.advance(0)
    assert len(harness.processes) == 2


def test_manager_terminates_and_kills_worker_that_does_not_exit(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a", idle_timeout=60)
    harness.advance(61)
    harness.advance(UNLOAD_SECONDS)
    assert process.signals == []
    harness.advance(0.1)
    assert process.signals == ["TERM"]
    harness.advance(UNLOAD_SECONDS)
    assert process.signals[-1] == "KILL"


def test_manager_evicts_least_recently_used(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=2)
    first, second = harness.load("a"), harness.load("b")
    harness.now += 100
    harness.stats(first, idle_seconds=1, steps=9)
    harness.stats(second, idle_seconds=50, steps=9)
    harness.acquire("c")
    assert len(harness.processes) == 2
    assert retire_message(second)
    assert retire_message(first) is None
    second.end()
    harness.advance(0)
    assert harness.processes[-1].options.model == "c"


def test_manager_does_not_evict_model_before_first_use(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1)
    harness.acquire("a")
    (first,) = harness.processes
    first.send(protocol.Ready(INFO))
    harness.advance(0)
    harness.acquire("b")
    assert retire_message(first) is None
    harness.stats(first, idle_seconds=0.1, steps=3)  # it has served a request
    harness.advance(0)
    assert retire_message(first)


def test_manager_drains_busy_model_for_long_waiting_one(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1)
    process = harness.load("a")
    harness.stats(process, running=1)
    key = harness.acquire("b")
    reason = "1 models are loaded, the most allowed, and all of them are in use"
    queued = ReplicaState("b-2", "queued", reason=reason)
    waiting = WorkerState(
        key, "loading", reason, replicas=[queued], loading=LoadProgress("queued"), loading_since=harness.now
    )
    assert harness.published[-1] == waiting
    harness.advance(9)
    assert retire_message(process) is None
    harness.advance(2)
    assert retire_message(process) == protocol.Retire(0, True)
    harness.advance(1000)
    assert process.signals == []  # draining has no time limit


def test_manager_evicts_when_memory_is_short(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.processes.memory.read_size", lambda model: model_size(4 * GB))
    monkeypatch.setattr("syringa.engine.processes.handle.WorkerHandle._resident_bytes", lambda self: 5 * GB)
    harness = ManagerHarness(folder)
    harness.free = 10 * GB
    process = harness.load("a")
    harness.free = 4 * GB  # 4 + 0.5 are needed
    harness.acquire("b")
    assert retire_message(process)
    process.end()
    harness.free = 10 * GB
    harness.advance(0)
    assert harness.processes[-1].options.model == "b"


def test_manager_reserves_the_cache_of_a_running_worker(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache fills with time, so the memory that it has not used yet is not free for others."""
    monkeypatch.setattr("syringa.engine.processes.memory.read_size", lambda model: model_size(4 * GB))
    monkeypatch.setattr("syringa.engine.processes.memory.planned_memory", lambda options: 7 * GB)
    monkeypatch.setattr("syringa.engine.processes.handle.WorkerHandle._resident_bytes", lambda self: 5 * GB)
    harness = ManagerHarness(folder)
    harness.free = 20 * GB
    process = harness.load("a")
    harness.free = 15 * GB
    assert harness.load("b").options.free_memory == 13 * GB
    harness.free = 8 * GB  # of which the two will take 4
    harness.acquire("c")
    assert retire_message(process)


def test_manager_evicts_nothing_for_a_model_that_never_fits(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"small": model_size(GB), "large": model_size(50 * GB)}
    monkeypatch.setattr("syringa.engine.processes.memory.read_size", lambda model: needs[model])
    monkeypatch.setattr("syringa.engine.processes.handle.WorkerHandle._resident_bytes", lambda self: 2 * GB)
    harness = ManagerHarness(folder)
    harness.free = 10 * GB
    small = harness.load("small")
    harness.acquire("large")
    harness.processes[-1].end(managed_process.EXIT_NO_MEMORY)
    harness.advance(0)
    harness.advance(1)
    assert harness.status("large") == "failed"
    assert retire_message(small) is None
    assert len(harness.processes) == 2


def test_manager_evicts_for_worker_out_of_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.processes.handle.WorkerHandle._resident_bytes", lambda self: GB)
    harness = ManagerHarness(folder)
    first = harness.load("a")
    harness.acquire("b")
    harness.processes[-1].end(managed_process.EXIT_NO_MEMORY)
    harness.advance(0)
    assert harness.status("b") == "loading"
    harness.advance(1)
    assert retire_message(first)
    first.end()
    harness.free += GB
    harness.advance(1)
    harness.advance(0)
    assert len(harness.processes) == 3
    harness.processes[-1].end(managed_process.EXIT_NO_MEMORY)
    harness.advance(0)
    assert harness.status("b") == "failed"
    # From now on no model is evicted for it while even that would not be enough.
    harness.free -= GB
    other = harness.load("a")
    harness.advance(60)
    harness.acquire("b")
    harness.advance(1)
    assert harness.status("b") == "failed"
    assert retire_message(other) is None
    assert len(harness.processes) == 4


def test_manager_restarts_dead_worker_that_was_in_use(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a")
    harness.stats(process, idle_seconds=RECENT_SECONDS - 1, steps=9)
    harness.now += 0
    process.end(-signal.SIGKILL)
    harness.advance(0)
    assert harness.status("a") == "loading"
    harness.advance(0.05)
    assert len(harness.processes) == 1  # not immediately
    harness.advance(0.1)
    assert len(harness.processes) == 2


def test_manager_does_not_restart_unused_dead_worker(folder: str) -> None:
    harness = ManagerHarness(folder)
    for name, restart in (("a", False), ("b", True)):
        process = harness.load(name, restart=restart)
        harness.now += RECENT_SECONDS + 1
        harness.stats(process, idle_seconds=RECENT_SECONDS + 1)
        process.end(1)
        harness.advance(0)
    assert [harness.status(name) for name in "ab"] == ["cold", "loading"]


def test_manager_retries_worker_that_dies_while_loading(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.acquire("a")
    for status in ("loading", "failed"):
        harness.processes[-1].end(-signal.SIGSEGV)
        harness.advance(0)
        assert harness.status("a") == status
        harness.advance(60)
    assert len(harness.processes) == 2
    harness.acquire("b", restart=True)  # the default model at startup
    harness.processes[-1].end(-signal.SIGSEGV)
    harness.advance(0)
    assert harness.status("b") == "failed"


def test_restart_backoff_doubles_up_to_limit(folder: str) -> None:
    harness = ManagerHarness(folder)
    pauses = []
    for _ in range(12):
        before = harness.now
        harness.acquire("a")
        while harness.status("a") != "loading" or harness.processes[-1].status is not None:
            harness.now += 0.05
            harness.acquire("a")
        pauses.append(harness.now - before)
        harness.processes[-1].end(managed_process.EXIT_CANNOT_START)
        harness.advance(0)
        assert harness.status("a") == "failed"
    assert pauses[0] == 0
    assert pauses[1] < 0.3
    assert pauses[4] > 0.7
    assert 29 < pauses[-1] < 31


def test_model_that_was_unloaded_after_healthy_use_starts_with_a_short_backoff(folder: str) -> None:
    harness = ManagerHarness(folder)
    for _ in range(8):
        harness.acquire("a")
        harness.advance(60)
        harness.acquire("a")
        harness.processes[-1].end(managed_process.EXIT_CANNOT_START)
        harness.advance(0)
    harness.advance(60)
    process = harness.load("a", idle_timeout=100)
    harness.advance(managed_process.HEALTHY_SECONDS + 100)
    harness.stats(process, idle_seconds=101)
    harness.advance(0)
    process.end(0)
    harness.advance(0)
    assert harness.status("a") == "cold"
    harness.acquire("a")
    harness.processes[-1].end(managed_process.EXIT_CANNOT_START)
    harness.advance(0)
    count = len(harness.processes)
    harness.now += 2 * managed_process.MIN_BACKOFF_SECONDS
    harness.acquire("a")
    assert len(harness.processes) == count + 1


def test_manager_does_not_retry_model_that_cannot_start(folder: str) -> None:
    harness = ManagerHarness(folder)
    for name, status, again in (("a", managed_process.EXIT_CANNOT_START, False), ("b", 1, True)):
        harness.acquire(name, restart=True)
        count = len(harness.processes)
        harness.processes[-1].end(status)
        harness.advance(0)
        assert harness.status(name) == "failed"
        harness.advance(40)
        assert (len(harness.processes) > count) is again


def test_manager_drops_queued_model_after_load_timeout(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1, load_timeout=50)
    process = harness.load("a")
    harness.stats(process, running=1)
    harness.acquire("b")
    for _ in range(5):
        harness.advance(9)
        harness.stats(process, running=1)
    assert harness.status("b") == "loading"
    harness.advance(10)
    assert harness.status("b") == "cold"


def test_manager_unloads_and_forgets_released_model(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a", restart=True)
    harness.stats(process, running=1)
    harness.workers.release(worker_key(process.options))
    harness.workers.release("unknown")
    harness.advance(1)
    assert retire_message(process) is None
    harness.stats(process, steps=5)
    harness.advance(0)
    assert retire_message(process)
    process.end()
    harness.advance(0)
    assert harness.status("a") == "unknown"


def test_opportunistic_load_evicts_nothing(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=2)
    first = harness.load("a")
    harness.acquire("b", restart=True, opportunistic=True)
    assert [each.options.model for each in harness.processes] == ["a", "b"]  # both fit
    harness.acquire("c", restart=True, opportunistic=True)
    assert harness.status("c") == "cold"
    harness.advance(60)
    assert retire_message(first) is None
    harness.acquire("c")
    assert retire_message(first)


def test_opportunistic_request_does_not_demote_waiting_model(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1)
    process = harness.load("a")
    harness.stats(process, running=1)
    harness.acquire("b")
    harness.acquire("b", opportunistic=True)
    assert harness.status("b") == "loading"


def test_manager_logs_model_name(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = ManagerHarness(folder)
    caplog.set_level("INFO")
    harness.workers.acquire(AcquireModel(WorkerOptions(socket="", model="/some/path"), 60, name="chat"))
    harness.workers.tick()
    harness.workers.tick()
    (process,) = harness.processes
    process.send(protocol.Ready(INFO))
    harness.stats(process, steps=1, idle_seconds=0)
    harness.advance(61)
    assert retire_message(process)
    process.end()
    harness.advance(0)
    loaded, unloaded = "model loaded: model=chat replica=chat-1", "model unloaded: model=chat replica=chat-1"
    assert caplog.messages == [loaded, unloaded]
