"""The worker manager with models on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.loading.memory_plan import PROGRAM_BYTES
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import AcquireModel
from syringa.engine.processes.memory import memory_needs
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.worker.options import WorkerOptions
from tests.engine.processes.manager_harness import GB, FakeProcess, ManagerHarness, model_size, retire_message
from tests.engine.processes.stub_worker import INFO


def gpu(free: int, total: int = 100) -> GpuMemory:
    return GpuMemory(free * GB, total * GB)


def load_on_gpu(harness: ManagerHarness, name: str, memory: int) -> FakeProcess:
    harness.acquire(name)
    process = harness.processes[-1]
    process.send(protocol.Ready(INFO, "cuda", memory * GB))
    harness.stats(process, steps=1)
    return process


def test_single_model_gets_whole_gpu(folder: str) -> None:
    harness = ManagerHarness(folder, model="a")
    harness.gpu = gpu(99)
    harness.acquire("a")
    assert harness.processes[0].options.gpu_memory_fraction == 1.0


@pytest.mark.parametrize("setting", [0.0, 0.3])
def test_configured_models_share_gpu_memory(folder: str, monkeypatch: pytest.MonkeyPatch, setting: float) -> None:
    sizes = {"a": 20 * GB, "b": 2 * GB, "c": 0}
    monkeypatch.setattr("syringa.engine.processes.memory.read_size", lambda model: model_size(sizes[model]))
    models = tuple(ModelSpec(id=name, path=name, dtype="int8" if name == "c" else "auto") for name in sizes)
    harness = ManagerHarness(folder, models=models, gpu_memory_fraction=setting)
    harness.gpu = gpu(99)
    fractions = []
    for name in "ab":
        harness.workers.acquire(
            AcquireModel(WorkerOptions.from_config(ModelSpec(id=name, path=name), Config(gpu_memory_fraction=setting)))
        )
        harness.workers.tick()
        fractions.append(harness.processes[-1].options.gpu_memory_fraction)
    if setting:
        assert fractions == [setting, setting]
    else:  # what they need and half of the rest each: c runs on the CPU
        assert fractions == [pytest.approx(x, abs=0.001) for x in (0.689, 0.311)]
    assert len({state.key for state in harness.published}) == 2  # the fraction is not part of a worker's key


@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), OSError(5, "disk"), UnicodeDecodeError("a", b"", 0, 1, "")]
)
def test_manager_survives_unreadable_model_folder(
    folder: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def locate(model: str) -> None:
        raise error

    monkeypatch.setattr("syringa.engine.loading.model_size.locate", locate)
    harness = ManagerHarness(folder)
    harness.acquire("a")
    assert harness.processes[0].options.model == "a"  # the worker will report the error


def test_memory_needs_of_hf_models_cover_bf16_weights(tmp_path: Path) -> None:
    needed = []
    sizes = {"hidden_size": 1000, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    for kind in ("llama", "olmo2"):
        path = tmp_path / kind
        path.mkdir()
        config = {"model_type": kind, "architectures": ["X"], "vocab_size": 1000, "intermediate_size": 333_000}
        (path / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 16}))
        (path / "tokenizer.json").write_text("{}")
        header = json.dumps({"a": {"shape": [1000, 1_000_000]}}).encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        needed.append(memory_needs(WorkerOptions(socket="", model=str(path), max_running=1, dtype="int8")))
    assert 1.9 < (needed[1]["cpu"] - PROGRAM_BYTES) / (needed[0]["cpu"] - PROGRAM_BYTES) < 2.1
    assert needed[0]["cuda"] == pytest.approx(needed[1]["cuda"], rel=0.01)
    assert needed[0]["cuda"] > 2 * 10**9


def test_manager_evicts_gpu_model_when_gpu_memory_is_short(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used GPU model is evicted, whatever host memory is free; CPU models stay."""
    monkeypatch.setattr("syringa.engine.processes.memory.read_size", lambda model: model_size(10 * GB))
    monkeypatch.setattr("syringa.engine.processes.handle.WorkerHandle._resident_bytes", lambda self: GB)
    harness = ManagerHarness(folder)
    harness.gpu = gpu(99)
    first, second = load_on_gpu(harness, "a", 50), load_on_gpu(harness, "b", 40)
    on_cpu = harness.load("c")
    harness.now += 100
    harness.stats(first, idle_seconds=1, steps=9)
    harness.stats(second, idle_seconds=50, steps=9)
    harness.stats(on_cpu, idle_seconds=90, steps=9)
    harness.gpu = gpu(9)
    harness.acquire("d")
    assert retire_message(second)
    assert retire_message(first) is None
    assert retire_message(on_cpu) is None
    assert harness.published[-1].reason == "GPU memory is short"
    second.end()
    harness.gpu = gpu(49)
    harness.advance(0)
    assert harness.processes[-1].options.model == "d"


def test_manager_evicts_for_worker_out_of_gpu_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only GPU models are evicted for it; when it fails without them too, it has failed for good."""
    monkeypatch.setattr("syringa.engine.processes.handle.WorkerHandle._resident_bytes", lambda self: GB)
    harness = ManagerHarness(folder)
    harness.gpu = gpu(99)
    first, on_cpu = load_on_gpu(harness, "a", 60), harness.load("c")
    harness.gpu = gpu(39)
    harness.acquire("b")
    harness.processes[-1].end(managed_process.EXIT_NO_GPU_MEMORY)
    harness.advance(0)
    assert harness.status("b") == "loading"
    harness.advance(1)
    assert retire_message(first)
    first.end()
    harness.gpu = gpu(99)
    harness.advance(1)
    harness.processes[-1].end(managed_process.EXIT_NO_GPU_MEMORY)
    harness.advance(0)
    assert harness.status("b") == "failed"
    assert retire_message(on_cpu) is None


def test_manager_without_nvml(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML a worker is started in any case; when it is out of memory, another model is evicted."""
    harness = ManagerHarness(folder)
    first = load_on_gpu(harness, "a", 60)
    options = WorkerOptions(socket="", model="b", device="cuda")
    harness.workers.acquire(AcquireModel(options))
    harness.workers.tick()
    assert harness.processes[-1].options.gpu_memory_fraction == 1.0
    harness.processes[-1].end(managed_process.EXIT_NO_GPU_MEMORY)
    harness.advance(0)
    harness.advance(1)
    assert retire_message(first)
