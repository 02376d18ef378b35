from __future__ import annotations

import json
import selectors
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import State, Want, key_of
from syringa.engine.processes.eviction import OVERHEAD
from syringa.engine.processes.manager import LEAVE_SECONDS, RECENT_SECONDS, ModelWorkers
from syringa.engine.processes.memory import needs
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.worker.server import WorkerOptions
from syringa.types import EngineStats
from tests.engine.processes.stub_worker import INFO

GB = 1 << 30


class Process:
    """A worker's process as the supervisor sees it; the test says what it does."""

    pid = -1

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.stdin = None
        self.status: int | None = None
        self.signals: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(options.socket)
        self._listener.listen()
        self._frames = protocol.worker_frames()
        self._connection: socket.socket | None = None

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.signals.append("TERM")

    def kill(self) -> None:
        self.signals.append("KILL")

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def say(self, message: protocol.FromWorker) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.setblocking(False)
        self._connection.sendall(protocol.frame(message))

    def heard(self) -> list[protocol.ToWorker]:
        assert self._connection is not None
        try:
            return list(self._frames.feed(self._connection.recv(1 << 16)))
        except BlockingIOError:
            return []

    def end(self, status: int = 0) -> None:
        self.status = status
        for each in (self._connection, self._listener):
            if each is not None:
                each.close()


houses: list[House] = []  # that a test has made


class House:
    """Workers whose clock, memory and processes belong to the test."""

    def __init__(self, folder: str, **settings: Any) -> None:
        houses.append(self)
        self.now, self.free = 1000.0, 100 * GB
        self.gpu: GpuMemory | None = None
        self.told: list[State] = []
        self.processes: list[Process] = []
        self.selector = selectors.DefaultSelector()
        self.workers = ModelWorkers(
            folder, Config(**settings), self.selector, self.told.append,
            spawn=self._spawn, clock=lambda: self.now, free=lambda: self.free,
            gpu=lambda: self.gpu,
        )  # fmt: skip

    def close(self) -> None:
        for process in self.processes:
            process.end()
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()

    def _spawn(self, options: WorkerOptions) -> Any:
        self.processes.append(Process(options))
        return self.processes[-1]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.workers.tick()

    def want(self, name: str, idle: float = 0.0, *, keep: bool = False, soft: bool = False) -> str:
        options = WorkerOptions(socket="", model=name)
        self.workers.want(Want(options, idle, keep, soft))
        self.workers.tick()
        self.workers.tick()  # connects
        return key_of(options)

    def load(self, name: str, idle: float = 0.0, *, keep: bool = False) -> Process:
        self.want(name, idle, keep=keep)
        process = self.processes[-1]
        process.say(protocol.Ready(INFO))
        self.stats(process, steps=1)
        return process

    def stats(self, process: Process, **values: Any) -> None:
        process.say(protocol.Stats(EngineStats(**values)))
        self.workers.tick()

    def status(self, name: str) -> str:
        key = key_of(WorkerOptions(socket="", model=name))
        return next((state.status for state in self.workers.states() if state.key == key), "unknown")


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as path:
        yield path
    while houses:
        houses.pop().close()


def retired(process: Process) -> protocol.Retire | None:
    return next((each for each in process.heard() if isinstance(each, protocol.Retire)), None)


def test_from_cold_to_loaded_and_back(folder: str) -> None:
    house = House(folder)
    key = house.want("a", idle=60)
    (process,) = house.processes
    assert [state.status for state in house.told] == ["loading", "loading"]
    process.say(protocol.Ready(INFO))
    house.pass_time(0)
    assert house.told[-1] == State(key, "loaded", process.options.socket)
    house.stats(process, running=1)
    house.pass_time(1000)
    assert retired(process) is None  # it is in use
    house.stats(process, idle_seconds=59)
    house.pass_time(0.9)
    assert retired(process) is None
    house.pass_time(0.1)
    assert house.told[-1] == State(key, "cold", process.options.socket)  # before the worker hears of it
    assert retired(process) == protocol.Retire(60, False)
    process.end()
    house.pass_time(0)
    assert house.told[-1] == State(key, "cold")
    assert not house.selector.get_map()


def test_a_worker_that_was_just_used_stays(folder: str) -> None:
    house = House(folder)
    process = house.load("a", idle=60)
    house.pass_time(61)
    assert retired(process)
    process.say(protocol.Stays(EngineStats(running=1)))
    house.pass_time(0)
    assert house.status("a") == "loaded"
    house.stats(process, idle_seconds=0)
    house.pass_time(59)
    assert retired(process) is None


def test_one_that_is_wanted_while_it_leaves_comes_back(folder: str) -> None:
    house = House(folder)
    process = house.load("a", idle=60)
    house.pass_time(61)
    house.now += 0.01
    house.want("a", idle=60)
    assert house.status("a") == "loading"
    process.end()
    house.pass_time(0)
    assert len(house.processes) == 2


def test_one_that_does_not_leave_is_made_to(folder: str) -> None:
    house = House(folder)
    process = house.load("a", idle=60)
    house.pass_time(61)
    house.pass_time(LEAVE_SECONDS)
    assert process.signals == []
    house.pass_time(0.1)
    assert process.signals == ["TERM"]
    house.pass_time(LEAVE_SECONDS)
    assert process.signals[-1] == "KILL"


def test_the_least_recently_used_makes_room(folder: str) -> None:
    house = House(folder, max_loaded=2)
    first, second = house.load("a"), house.load("b")
    house.now += 100
    house.stats(first, idle_seconds=1, steps=9)
    house.stats(second, idle_seconds=50, steps=9)
    house.want("c")
    assert len(house.processes) == 2
    assert retired(second)
    assert retired(first) is None
    second.end()
    house.pass_time(0)
    assert house.processes[-1].options.model == "c"


def test_one_that_was_just_loaded_is_left_to_who_waited_for_it(folder: str) -> None:
    house = House(folder, max_loaded=1)
    house.want("a")
    (first,) = house.processes
    first.say(protocol.Ready(INFO))
    house.pass_time(0)
    house.want("b")
    assert retired(first) is None
    house.stats(first, idle_seconds=0.1, steps=3)  # it has been of use
    house.pass_time(0)
    assert retired(first)


def test_a_busy_one_leaves_when_it_is_done_if_another_waits_for_long(folder: str) -> None:
    house = House(folder, max_loaded=1)
    process = house.load("a")
    house.stats(process, running=1)
    key = house.want("b")
    assert house.told[-1] == State(
        key, "loading", reason="1 models are loaded, as many as may be, and all of them are in use"
    )
    house.pass_time(9)
    assert retired(process) is None
    house.pass_time(2)
    assert retired(process) == protocol.Retire(0, True)
    house.pass_time(1000)
    assert process.signals == []  # however long it takes


def test_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.processes.memory._weights", lambda model: (4 * GB, True))
    monkeypatch.setattr("syringa.engine.processes.handle.ModelWorker._resident", lambda self: 5 * GB)
    house = House(folder)
    house.free = 10 * GB
    process = house.load("a")
    house.free = 5 * GB  # 4 * 1.3 + 0.5 are needed
    house.want("b")
    assert retired(process)
    process.end()
    house.free = 10 * GB
    house.pass_time(0)
    assert house.processes[-1].options.model == "b"


def test_a_worker_that_found_too_little_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.processes.handle.ModelWorker._resident", lambda self: GB)
    house = House(folder)
    first = house.load("a")
    house.want("b")
    house.processes[-1].end(managed_process.NO_MEMORY)
    house.pass_time(0)
    assert house.status("b") == "loading"
    house.pass_time(1)
    assert retired(first)
    first.end()
    house.free += GB
    house.pass_time(1)
    house.pass_time(0)
    assert len(house.processes) == 3
    house.processes[-1].end(managed_process.NO_MEMORY)
    house.pass_time(0)
    assert house.status("b") == "failed"
    # From now on nobody has to leave for it, as long as even that would not be enough.
    house.free -= GB
    other = house.load("a")
    house.pass_time(60)
    house.want("b")
    house.pass_time(1)
    assert house.status("b") == "failed"
    assert retired(other) is None
    assert len(house.processes) == 4


def test_a_dead_worker_comes_back_if_it_was_in_use(folder: str) -> None:
    house = House(folder)
    process = house.load("a")
    house.stats(process, idle_seconds=RECENT_SECONDS - 1, steps=9)
    house.now += 0
    process.end(-signal.SIGKILL)
    house.pass_time(0)
    assert house.status("a") == "loading"
    house.pass_time(0.05)
    assert len(house.processes) == 1  # not at once
    house.pass_time(0.1)
    assert len(house.processes) == 2


def test_a_dead_worker_that_nobody_used_goes_cold(folder: str) -> None:
    house = House(folder)
    for name, keep in (("a", False), ("b", True)):
        process = house.load(name, keep=keep)
        house.now += RECENT_SECONDS + 1
        house.stats(process, idle_seconds=RECENT_SECONDS + 1)
        process.end(1)
        house.pass_time(0)
    assert [house.status(name) for name in "ab"] == ["cold", "loading"]


def test_one_that_dies_while_it_loads_gets_another_chance(folder: str) -> None:
    house = House(folder)
    house.want("a")
    for status in ("loading", "failed"):
        house.processes[-1].end(-signal.SIGSEGV)
        house.pass_time(0)
        assert house.status("a") == status
        house.pass_time(60)
    assert len(house.processes) == 2
    house.want("b", keep=True)  # the default model, at the start
    house.processes[-1].end(-signal.SIGSEGV)
    house.pass_time(0)
    assert house.status("b") == "failed"


def test_pauses_grow(folder: str) -> None:
    house = House(folder)
    pauses = []
    for _ in range(12):
        before = house.now
        house.want("a")
        while house.status("a") != "loading" or house.processes[-1].status is not None:
            house.now += 0.05
            house.want("a")
        pauses.append(house.now - before)
        house.processes[-1].end(managed_process.CANNOT_START)
        house.pass_time(0)
        assert house.status("a") == "failed"
    assert pauses[0] == 0
    assert pauses[1] < 0.3
    assert pauses[4] > 0.7
    assert 29 < pauses[-1] < 31


def test_one_that_cannot_be_loaded_is_not_tried_unasked(folder: str) -> None:
    house = House(folder)
    for name, status, again in (("a", managed_process.CANNOT_START, False), ("b", 1, True)):
        house.want(name, keep=True)
        count = len(house.processes)
        house.processes[-1].end(status)
        house.pass_time(0)
        assert house.status(name) == "failed"
        house.pass_time(40)
        assert (len(house.processes) > count) is again


def test_who_waits_in_vain_is_forgotten(folder: str) -> None:
    house = House(folder, max_loaded=1, load_timeout=50)
    process = house.load("a")
    house.stats(process, running=1)
    house.want("b")
    for _ in range(5):
        house.pass_time(9)
        house.stats(process, running=1)
    assert house.status("b") == "loading"
    house.pass_time(10)
    assert house.status("b") == "cold"


def test_a_dropped_model_leaves_and_is_forgotten(folder: str) -> None:
    house = House(folder)
    process = house.load("a", keep=True)
    house.stats(process, running=1)
    house.workers.drop(key_of(process.options))
    house.workers.drop("unknown")
    house.pass_time(1)
    assert retired(process) is None
    house.stats(process, steps=5)
    house.pass_time(0)
    assert retired(process)
    process.end()
    house.pass_time(0)
    assert house.status("a") == "unknown"


def test_what_is_preloaded_drives_nobody_out(folder: str) -> None:
    house = House(folder, max_loaded=2)
    first = house.load("a")
    house.want("b", keep=True, soft=True)
    assert [each.options.model for each in house.processes] == ["a", "b"]  # there is room
    house.want("c", keep=True, soft=True)
    assert house.status("c") == "cold"
    house.pass_time(60)
    assert retired(first) is None
    house.want("c")
    assert retired(first)


def test_one_that_somebody_waits_for_is_not_taken_for_less(folder: str) -> None:
    house = House(folder, max_loaded=1)
    process = house.load("a")
    house.stats(process, running=1)
    house.want("b")
    house.want("b", soft=True)
    assert house.status("b") == "loading"


# On a GPU


def gpu(free: int, total: int = 100) -> GpuMemory:
    return GpuMemory(free * GB, total * GB)


def load_on_gpu(house: House, name: str, memory: int) -> Process:
    house.want(name)
    process = house.processes[-1]
    process.say(protocol.Ready(INFO, "cuda", memory * GB))
    house.stats(process, steps=1)
    return process


def test_a_model_alone_may_take_the_whole_gpu(folder: str) -> None:
    house = House(folder, model="a")
    house.gpu = gpu(99)
    house.want("a")
    assert house.processes[0].options.gpu_memory_fraction == 1.0


@pytest.mark.parametrize("setting", [0.0, 0.3])
def test_configured_models_share_the_gpu(folder: str, monkeypatch: pytest.MonkeyPatch, setting: float) -> None:
    sizes = {"a": 20 * GB, "b": 2 * GB, "c": 0}
    monkeypatch.setattr("syringa.engine.processes.memory._weights", lambda model: (sizes[model], True))
    models = tuple(ModelSpec(id=name, path=name, dtype="int8" if name == "c" else "auto") for name in sizes)
    house = House(folder, models=models, gpu_memory_fraction=setting)
    house.gpu = gpu(99)
    fractions = []
    for name in "ab":
        house.workers.want(Want(WorkerOptions.of(ModelSpec(id=name, path=name), Config(gpu_memory_fraction=setting))))
        house.workers.tick()
        fractions.append(house.processes[-1].options.gpu_memory_fraction)
    if setting:
        assert fractions == [setting, setting]
    else:  # what they need, and the rest in two: c is for the CPU
        assert fractions == [pytest.approx(x, abs=0.001) for x in (0.689, 0.311)]
    assert len({state.key for state in house.told}) == 2  # the share is no part of what a worker is known by


@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), OSError(5, "disk"), UnicodeDecodeError("a", b"", 0, 1, "")]
)
def test_a_folder_that_cannot_be_read_harms_nobody(
    folder: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def locate(model: str) -> None:
        raise error

    monkeypatch.setattr("syringa.modelfiles.locate", locate)
    house = House(folder)
    house.want("a")
    assert house.processes[0].options.model == "a"  # which will say what is wrong


def test_what_runs_on_transformers_is_read_in_bf16_first(tmp_path: Path) -> None:
    needed = []
    for kind in ("llama", "gemma"):
        path = tmp_path / kind
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": kind}))
        (path / "tokenizer.json").write_text("{}")
        header = json.dumps({"a": {"shape": [1000, 1_000_000]}}).encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        needed.append(needs(WorkerOptions(socket="", model=str(path))))
    assert 1.9 < (needed[1]["cpu"] - OVERHEAD) / (needed[0]["cpu"] - OVERHEAD) < 2.1
    assert needed[0]["cuda"] == needed[1]["cuda"] > 2 * 10**9


def test_gpu_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that does not fit on the GPU has the least recently used leave that is there, whatever the machine has
    free; and one for the CPU stays."""
    monkeypatch.setattr("syringa.engine.processes.memory._weights", lambda model: (10 * GB, True))
    monkeypatch.setattr("syringa.engine.processes.handle.ModelWorker._resident", lambda self: GB)
    house = House(folder)
    house.gpu = gpu(99)
    first, second = load_on_gpu(house, "a", 50), load_on_gpu(house, "b", 40)
    on_cpu = house.load("c")
    house.now += 100
    house.stats(first, idle_seconds=1, steps=9)
    house.stats(second, idle_seconds=50, steps=9)
    house.stats(on_cpu, idle_seconds=90, steps=9)
    house.gpu = gpu(9)
    house.want("d")
    assert retired(second)
    assert retired(first) is None
    assert retired(on_cpu) is None
    assert house.told[-1].reason == "GPU memory is short"
    second.end()
    house.gpu = gpu(49)
    house.pass_time(0)
    assert house.processes[-1].options.model == "d"


def test_a_worker_that_found_too_little_gpu_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on the GPU leave for it and nobody else does; then it is known that it is hopeless."""
    monkeypatch.setattr("syringa.engine.processes.handle.ModelWorker._resident", lambda self: GB)
    house = House(folder)
    house.gpu = gpu(99)
    first, on_cpu = load_on_gpu(house, "a", 60), house.load("c")
    house.gpu = gpu(39)
    house.want("b")
    house.processes[-1].end(managed_process.NO_GPU_MEMORY)
    house.pass_time(0)
    assert house.status("b") == "loading"
    house.pass_time(1)
    assert retired(first)
    first.end()
    house.gpu = gpu(99)
    house.pass_time(1)
    house.processes[-1].end(managed_process.NO_GPU_MEMORY)
    house.pass_time(0)
    assert house.status("b") == "failed"
    assert retired(on_cpu) is None


def test_a_gpu_that_nobody_can_ask(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver's library, whoever tries finds out, and then another makes room."""
    house = House(folder)
    first = load_on_gpu(house, "a", 60)
    options = WorkerOptions(socket="", model="b", device="cuda")
    house.workers.want(Want(options))
    house.workers.tick()
    assert house.processes[-1].options.gpu_memory_fraction == 1.0
    house.processes[-1].end(managed_process.NO_GPU_MEMORY)
    house.pass_time(0)
    house.pass_time(1)
    assert retired(first)


def test_logs_name_the_model(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    house = House(folder)
    caplog.set_level("INFO")
    house.workers.want(Want(WorkerOptions(socket="", model="/some/path"), 60, name="chat"))
    house.workers.tick()
    house.workers.tick()
    (process,) = house.processes
    process.say(protocol.Ready(INFO))
    house.stats(process, steps=1, idle_seconds=0)
    house.pass_time(61)
    assert retired(process)
    process.end()
    house.pass_time(0)
    assert caplog.messages == ["chat is loaded", "chat is unloaded"]
