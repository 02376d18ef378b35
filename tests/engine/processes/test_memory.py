"""How much memory models need by their files, and what a worker is told of the memory that is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.loading.memory_plan import PROGRAM_BYTES
from syringa.engine.processes import memory, startup_plan
from syringa.engine.processes.control import AcquireModel
from syringa.engine.processes.eviction import GPU_OVERHEAD
from syringa.engine.processes.memory import memory_needs, replica_threads
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.vllm import memory as vllm_memory
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError
from tests.engine.loading.gguf_files import CACHE_BYTES, write_gguf
from tests.engine.processes.manager_harness import GB, ManagerHarness
from tests.engine.vllm.test_worker import write_model


def needs(path: Path, **settings: Any) -> int:
    return memory_needs(WorkerOptions(socket="", model=str(path), **settings))["cpu"]


def test_memory_needs_are_those_of_the_plan(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    short = needs(path, dtype="bf16")
    assert short > PROGRAM_BYTES + 2048 * CACHE_BYTES
    assert needs(path, dtype="bf16", max_model_len=8000) == short + (8000 - 2048) * CACHE_BYTES
    assert needs(path, dtype="bf16", kv_cache_tokens=65_536) == short + (65_536 - 2048) * CACHE_BYTES
    assert needs(path, dtype="bf16", kv_cache_gb=1.0) == short - 2048 * CACHE_BYTES + GB


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_memory_needs_of_unreadable_model_are_those_of_the_program(dtype: str) -> None:
    found = memory_needs(WorkerOptions(socket="", model="/no/such/model", dtype=dtype))
    assert found == {"cpu": PROGRAM_BYTES, "cuda": GPU_OVERHEAD}


def test_memory_needs_of_dtype_that_is_not_for_cpus(tmp_path: Path) -> None:
    assert needs(write_gguf(tmp_path / "m.gguf"), dtype="fp8") >= PROGRAM_BYTES


def test_manager_tells_worker_how_much_memory_was_free(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.free = 10 * GB
    harness.acquire("a")
    assert harness.processes[0].options.free_memory == 10 * GB


def test_manager_plans_first_worker_for_the_memory_that_was_announced(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.free = 10 * GB
    model = harness.workers.acquire(AcquireModel(WorkerOptions(socket="", model="a")))
    model.planned_free = 11 * GB
    harness.workers.tick()
    assert harness.processes[0].options.free_memory == 11 * GB
    assert model.planned_free == 0  # a worker that replaces it finds what is free then


@pytest.mark.parametrize(
    ("needs", "max_loaded", "fractions"),
    [
        ((60, 30, 20), 2, [0.65, 0.35, 0.3]),  # any two at a time: each leaves room for the largest of the others
        ((60, 30), 1, [1.0, 1.0]),
        ((50, 10), 0, [0.7, 0.3]),
    ],
)
def test_gpu_fraction_leaves_room_for_models_that_may_be_loaded_too(
    monkeypatch: pytest.MonkeyPatch, needs: tuple[int, ...], max_loaded: int, fractions: list[float]
) -> None:
    by_model = {str(number): need for number, need in enumerate(needs)}
    monkeypatch.setattr(memory, "memory_needs", lambda options: {"cpu": 0, "cuda": by_model[options.model]})
    specs = tuple(ModelSpec(id=name, path=name, device="cuda") for name in by_model)
    config = Config(models=specs, max_loaded=max_loaded)
    planner = memory.MemoryPlanner(config, lambda: 0, lambda: [GpuMemory(100, 100, "0")])
    options = [WorkerOptions.from_config(spec, config) for spec in specs]
    assert [planner.gpu_fraction(each, []) for each in options] == pytest.approx(fractions)


def test_replica_threads() -> None:
    assert replica_threads(0, 1) == 0
    assert replica_threads(6, 1) == 6
    assert replica_threads(6, 3) == 2
    assert replica_threads(1, 3) == 1


def test_worker_on_vllm_is_not_planned_by_the_rules_of_the_own_engine(folder: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    on_vllm = WorkerOptions(socket="", model=str(model), engine="vllm", dtype="fp32")
    size = (model / "model.safetensors").stat().st_size
    assert memory_needs(on_vllm)["cpu"] == vllm_memory.PROGRAM_BYTES + vllm_memory.CPU_CACHE_BYTES + size
    with_cache = msgspec.structs.replace(on_vllm, kv_cache_gb=2.0)
    assert memory_needs(with_cache)["cpu"] == vllm_memory.PROGRAM_BYTES + 2 * GB + size
    assert vllm_memory.gpu_bytes(with_cache, 80 * GB) == size + 2 * GB + GPU_OVERHEAD
    harness = ManagerHarness(folder)
    harness.gpus = [GpuMemory(free=60 * GB, total=80 * GB, name=str(index)) for index in range(4)]
    two_gpus = msgspec.structs.replace(on_vllm, engine_args={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5})
    harness.workers.acquire(AcquireModel(two_gpus, max_replicas=2))
    harness.workers.tick()
    (worker,) = harness.workers.models[0].replicas
    assert worker.device == "cuda"  # although Syringa's own engine runs fp32 on CPUs only
    assert worker.expected_gpu_bytes == 40 * GB
    options = harness.processes[0].options
    assert (options.gpu, options.free_memory, options.gpu_memory_fraction) == ("0,1", 0, 0.0)


def test_gpus_of_a_worker_are_a_group_that_overlaps_no_other(folder: str) -> None:
    harness = ManagerHarness(folder)
    harness.gpus = [GpuMemory(free=60 * GB, total=80 * GB, name=str(index)) for index in range(5)]
    planner = memory.MemoryPlanner(Config(), lambda: 0, lambda: harness.gpus)
    assert planner.choose_gpus([], 2) == (0, 1)
    assert planner.choose_gpus([1], 2) == (2, 3)
    assert planner.choose_gpus([0, 1, 2, 3], 2) == (0, 1)  # not (4, 0)
    assert planner.choose_gpus([0, 1, 2, 3]) == (4,)
    assert planner.choose_gpus([], 8) == (0, 1, 2, 3, 4)
    assert planner.gpu_names((2, 3)) == "2,3"
    harness.gpus.clear()
    assert planner.choose_gpus([], 2) == (0,)


def test_worker_on_several_gpus_is_counted_on_each_of_them(folder: str, tmp_path: Path) -> None:
    """Another one does not share the GPUs of the first, and waits when they are all in use."""
    harness = ManagerHarness(folder)
    harness.gpus = [GpuMemory(free=80 * GB, total=80 * GB, name=str(index)) for index in range(4)]

    def acquire(name: str, gpus: int) -> None:
        model = write_model(tmp_path / name)
        arguments = {"tensor_parallel_size": gpus, "gpu_memory_utilization": 0.99}
        options = WorkerOptions(socket="", model=str(model), engine="vllm", engine_args=arguments)
        harness.workers.acquire(AcquireModel(options))
        harness.workers.tick()

    acquire("a", 2)
    acquire("b", 1)
    acquire("c", 1)
    assert [process.options.gpu for process in harness.processes] == ["0,1", "2", "3"]
    acquire("d", 2)
    assert len(harness.processes) == 3
    (waiting,) = [each for model in harness.workers.models for each in model.replicas if each.phase == "queued"]
    assert "GPU memory is short" in waiting.reason


@pytest.mark.parametrize(("usable", "device"), [(True, "cuda"), (False, "cpu")])
def test_worker_is_expected_on_a_gpu_that_it_can_use(usable: bool, device: str) -> None:
    planner = memory.MemoryPlanner(Config(), lambda: 0, lambda: [GpuMemory(80 * GB, 80 * GB, "0", usable)])
    assert planner.expected_device(WorkerOptions(model="m", socket="")) == device
    assert planner.expected_device(WorkerOptions(model="m", socket="", device="cuda")) == "cuda"
    assert (
        planner.expected_device(WorkerOptions(model="m", socket="", engine="vllm")) == "cuda"
    )  # with a PyTorch of its own


def test_startup_plan_of_vllm_checks_its_interpreter(tmp_path: Path) -> None:
    spec = ModelSpec(id="m", path=str(write_model(tmp_path / "model")), engine="vllm", python=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot be run"):
        startup_plan.plan_model(spec, Config())
