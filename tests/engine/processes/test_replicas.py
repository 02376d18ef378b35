"""Several replicas of a model: the worker manager, alone and driven by the controller."""

from __future__ import annotations

import signal

import pytest

from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.engine.processes.local_provider import LocalProvider
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.processes.worker_process import DRAIN_MARGIN_SECONDS, UNLOAD_SECONDS
from syringa.fleet.controller import Controller
from syringa.fleet.decisions import SCALE_DOWN_SECONDS
from syringa.types import EngineStats
from tests.engine.processes.manager_harness import GB, FakeProcess, ManagerHarness, retire_message
from tests.engine.processes.stub_worker import INFO


def become_ready(harness: ManagerHarness, process: FakeProcess, **stats: object) -> None:
    harness.workers.tick()  # connect
    process.send(protocol.Ready(INFO, fingerprint="f"))
    process.send(protocol.StatsReply(EngineStats(steps=1, **stats)))  # type: ignore[arg-type]
    harness.workers.tick()


def load_replicas(harness: ManagerHarness, name: str, count: int, idle_timeout: float = 0.0) -> list[FakeProcess]:
    """Load a model with so many replicas."""
    before = len(harness.processes)
    key = harness.acquire(name, idle_timeout, replicas=(1, count))
    for _ in range(count - 1):
        harness.workers.add_replica(key)
        harness.workers.tick()
    made = harness.processes[before:]
    for process in made:
        become_ready(harness, process)
    return made


class DrivenHarness(ManagerHarness):
    """A manager whose controller runs with each tick."""

    def __init__(self, folder: str, **settings: object) -> None:
        super().__init__(folder, **settings)
        provider = LocalProvider(self.workers, lambda: self.now)
        self.controller = Controller(provider, provider.targets, lambda: self.now)

    def run_for(self, seconds: float, *beating: FakeProcess) -> None:
        for _ in range(round(2 * seconds)):
            super().run_for(0.5, *beating)
            self.controller.tick()
            self.workers.tick()


def test_added_replica_has_its_own_process_and_id(folder: str) -> None:
    harness = ManagerHarness(folder)
    first, second = load_replicas(harness, "a", 2)
    assert first.options.socket != second.options.socket
    assert harness.replicas("a") == {"a-1": "ready", "a-2": "ready"}
    state = harness.state("a")
    assert state is not None
    assert {replica.fingerprint for replica in state.replicas} == {"f"}
    assert {replica.address for replica in state.replicas} == {
        f"unix:{each.options.socket}" for each in (first, second)
    }


@pytest.mark.parametrize(("threads", "expected"), [(0, 2), (7, 2), (2, 1)])
def test_replicas_divide_the_threads(folder: str, monkeypatch: pytest.MonkeyPatch, threads: int, expected: int) -> None:
    import msgspec

    from syringa.engine.processes.control import AcquireModel
    from syringa.engine.worker.options import WorkerOptions

    monkeypatch.setattr("syringa.engine.processes.memory.available_cores", lambda: 8)
    harness = ManagerHarness(folder)
    options = msgspec.structs.replace(WorkerOptions(socket="", model="a"), threads=threads)
    harness.workers.acquire(AcquireModel(options, min_replicas=1, max_replicas=3))
    harness.workers.tick()
    assert harness.processes[0].options.threads == expected


def test_model_is_loaded_while_one_replica_is_ready(folder: str) -> None:
    harness = ManagerHarness(folder)
    key = harness.acquire("a", replicas=(1, 2))
    become_ready(harness, harness.processes[0])
    harness.workers.add_replica(key)
    harness.workers.tick()
    assert harness.replicas("a") == {"a-1": "ready", "a-2": "loading"}
    assert harness.status("a") == "loaded"


def test_crashed_replica_is_restarted_under_a_new_id(folder: str) -> None:
    harness = ManagerHarness(folder)
    first, _ = load_replicas(harness, "a", 2)
    first.health.set_running([b"1" * 16])
    first.end(-signal.SIGKILL)
    harness.advance(0)
    assert harness.status("a") == "loaded"
    assert harness.replicas("a") == {"a-2": "ready", "a-3": "queued"}
    state = harness.state("a")
    assert state is not None
    assert state.crashes == 1
    harness.advance(1)
    assert len(harness.processes) == 3


def test_added_replica_evicts_no_other_model(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=2)
    (other,) = load_replicas(harness, "b", 1)
    first, second = load_replicas(harness, "a", 2)  # two models, of which one has two replicas
    assert harness.status("a") == "loaded"
    key = harness.acquire("c", opportunistic=True)
    assert harness.status("c") == "cold"
    harness.workers.take_events()
    harness.workers.add_replica(key)
    harness.workers.tick()
    (event,) = harness.workers.take_events()
    assert (event.kind, event.reason) == ("failed", "2 models are loaded, the most allowed")
    assert [retire_message(process) for process in (other, first, second)] == [None] * 3


def test_added_replica_waits_while_a_request_waits_for_another_model(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1)
    (first,) = load_replicas(harness, "a", 1)
    first.send(protocol.StatsReply(EngineStats(running=1, steps=2)))
    harness.workers.tick()
    harness.acquire("b")
    assert harness.status("b") == "loading"  # it waits: the other one is in use
    harness.workers.add_replica(harness.acquire("a", replicas=(2, 2)))
    harness.workers.tick()
    assert len(harness.processes) == 1


def test_added_replica_has_the_context_of_the_others(folder: str) -> None:
    harness = ManagerHarness(folder)
    first, second = load_replicas(harness, "a", 2)
    assert first.options.kv_cache_tokens == 0
    assert second.options.kv_cache_tokens == 0  # the first was not loaded yet
    key = harness.acquire("a", replicas=(3, 3))
    harness.workers.add_replica(key)
    harness.workers.tick()
    assert harness.processes[-1].options.kv_cache_tokens == INFO.max_model_len


def test_failed_extra_replica_is_forgotten(folder: str) -> None:
    harness = ManagerHarness(folder)
    key = harness.acquire("a", replicas=(1, 2))
    become_ready(harness, harness.processes[0])
    harness.workers.add_replica(key)
    harness.workers.tick()
    harness.processes[1].end(managed_process.EXIT_CANNOT_START)
    harness.workers.take_events()
    harness.advance(0)
    assert [event.kind for event in harness.workers.take_events()] == ["failed"]
    assert harness.replicas("a") == {"a-1": "ready"}


def test_idle_model_is_unloaded_with_all_its_replicas(folder: str) -> None:
    harness = ManagerHarness(folder)
    first, second = load_replicas(harness, "a", 2, idle_timeout=60)
    harness.stats(first, idle_seconds=100, steps=1)
    harness.stats(second, running=1)
    harness.advance(100)
    assert retire_message(first) is None  # the model is in use
    harness.stats(second, idle_seconds=0, steps=1)
    harness.advance(61)
    assert retire_message(first)
    assert retire_message(second)
    first.end()
    second.end()
    harness.advance(0)
    assert harness.status("a") == "cold"
    assert harness.replicas("a") == {}


# Draining


def test_drained_replica_is_announced_before_it_is_asked_to_exit(folder: str) -> None:
    harness = ManagerHarness(folder)
    first, second = load_replicas(harness, "a", 2)
    assert harness.workers.drain("a-1", 30.0)
    replicas = {each.id: each for each in harness.published[-1].replicas}
    assert (replicas["a-1"].status, replicas["a-1"].grace) == ("draining", 30.0)
    assert retire_message(first) == protocol.Retire(0.0, True)
    assert harness.status("a") == "loaded"
    first.end()
    harness.advance(0)
    assert harness.replicas("a") == {"a-2": "ready"}
    assert not harness.workers.drain("a-1", 30.0)
    assert not harness.workers.drain("unknown", 30.0)
    assert second.signals == []


def test_drained_replica_that_does_not_exit_is_terminated_after_the_grace(folder: str) -> None:
    harness = ManagerHarness(folder)
    first, _ = load_replicas(harness, "a", 2)
    harness.workers.drain("a-1", 30.0)
    harness.advance(30.0 + DRAIN_MARGIN_SECONDS)
    assert first.signals == []
    harness.advance(0.1)
    assert first.signals == ["TERM"]
    harness.advance(UNLOAD_SECONDS)
    assert first.signals[-1] == "KILL"


def test_drained_replica_does_not_count_as_crashed(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.acquire("a")
    (process,) = harness.processes
    assert harness.workers.drain("a-1", 0.0)  # while it is loading
    harness.advance(0.1)
    assert process.signals == ["TERM"]
    process.end(-signal.SIGTERM)
    harness.advance(0)
    state = harness.state("a")
    assert state is not None
    assert state.crashes == 0


def test_queued_replica_is_drained_at_once(folder: str) -> None:
    harness = ManagerHarness(folder, max_loaded=1)
    process = harness.load("a")
    harness.stats(process, running=1)
    harness.acquire("b")
    assert harness.replicas("b") == {"b-2": "queued"}
    assert harness.workers.drain("b-2", 0.0)
    assert harness.status("b") == "cold"


def test_drained_only_replica_is_replaced_before_it_ends(folder: str) -> None:
    harness = DrivenHarness(folder)
    process = harness.load("a", restart=True)
    harness.stats(process, running=1)
    harness.workers.drain("a-1", 30.0)
    harness.run_for(1.5, process)
    assert harness.replicas("a") == {"a-1": "draining", "a-2": "loading"}
    assert harness.status("a") == "loading"
    become_ready(harness, harness.processes[1])
    process.end()
    harness.run_for(5, harness.processes[1])
    assert harness.replicas("a") == {"a-2": "ready"}


def test_drained_replica_of_a_kept_model_is_replaced_also_if_it_ends_at_once(folder: str) -> None:
    harness = ManagerHarness(folder)
    process = harness.load("a", restart=True)
    harness.workers.drain("a-1", 30.0)
    process.end()
    harness.advance(0)
    assert harness.replicas("a") == {"a-2": "loading"}


def test_drained_replica_of_an_unused_model_is_not_replaced(folder: str) -> None:
    harness = DrivenHarness(folder)
    process = harness.load("a")
    harness.now += 1000
    harness.workers.tick()
    harness.workers.drain("a-1", 30.0)
    process.end()
    harness.run_for(5)
    assert harness.status("a") == "cold"
    assert len(harness.processes) == 1


# With the controller


def test_controller_starts_the_minimum_of_a_loaded_model(folder: str) -> None:
    harness = DrivenHarness(folder)
    harness.acquire("a", replicas=(3, 3))
    assert len(harness.processes) == 1
    harness.run_for(2, *harness.processes)
    assert len(harness.processes) == 3
    for process in harness.processes:
        become_ready(harness, process)
    harness.run_for(5, *harness.processes)
    assert list(harness.replicas("a").values()) == ["ready"] * 3


def test_controller_adds_a_replica_when_requests_wait_and_removes_it_when_idle(folder: str) -> None:
    harness = DrivenHarness(folder)
    harness.acquire("a", replicas=(1, 2))
    (first,) = harness.processes
    become_ready(harness, first, running=4, waiting=3)
    harness.run_for(4, first)
    assert len(harness.processes) == 2
    second = harness.processes[1]
    become_ready(harness, second)
    harness.stats(first, running=1)
    harness.run_for(SCALE_DOWN_SECONDS - 5, first, second)
    assert list(harness.replicas("a").values()) == ["ready", "ready"]
    harness.run_for(10, first, second)
    assert harness.replicas("a") == {"a-1": "ready", "a-2": "draining"}


def test_controller_leaves_a_cold_model_alone(folder: str) -> None:
    harness = DrivenHarness(folder)
    harness.acquire("a", opportunistic=True, replicas=(2, 2))
    for process in harness.processes:
        process.end(managed_process.EXIT_CANNOT_START)
    harness.run_for(60)
    assert harness.status("a") == "failed"
    assert len(harness.processes) <= 2


# On GPUs


def test_each_replica_gets_its_own_gpu(folder: str) -> None:
    harness = ManagerHarness(folder, model="a")
    harness.gpus = [GpuMemory(90 * GB, 100 * GB, "2"), GpuMemory(95 * GB, 100 * GB, "GPU-77")]
    key = harness.acquire("a", replicas=(1, 2))
    harness.workers.add_replica(key)
    harness.workers.tick()
    assert [process.options.gpu for process in harness.processes] == ["GPU-77", "2"]
    assert [process.options.gpu_memory_fraction for process in harness.processes] == [1.0, 1.0]


@pytest.mark.parametrize("max_loaded", [0, 1])
def test_replicas_on_one_gpu_share_its_memory(folder: str, max_loaded: int) -> None:
    harness = ManagerHarness(folder, model="a", max_loaded=max_loaded)
    harness.gpus = [GpuMemory(90 * GB, 100 * GB, "0")]
    key = harness.acquire("a", replicas=(1, 2))
    harness.workers.add_replica(key)
    harness.workers.tick()
    assert [process.options.gpu for process in harness.processes] == ["", ""]
    assert [process.options.gpu_memory_fraction for process in harness.processes] == [0.5, 0.5]
