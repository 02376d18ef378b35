from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from syringa.engine.processes import nvml
from syringa.engine.processes.nvml import GpuMemory, GpuProcess, gpu_memories, gpu_processes

GB = 1 << 30


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake NVML on a machine with two GPUs; `queried` records the devices that were looked up."""
    nvml_stub = SimpleNamespace(queried=[], status=0)

    def by_index(index: ctypes.c_uint, device: Any) -> int:
        nvml_stub.queried.append(index.value)
        return 0 if index.value < 2 else 2

    def by_uuid(name: bytes, device: Any) -> int:
        nvml_stub.queried.append(name)
        return 0

    def memory(device: Any, info: Any) -> int:
        info._obj.total, info._obj.free = 80 * GB, 7 * GB
        return int(nvml_stub.status)

    nvml_stub.nvmlDeviceGetHandleByIndex_v2, nvml_stub.nvmlDeviceGetHandleByUUID = by_index, by_uuid
    nvml_stub.nvmlDeviceGetMemoryInfo = memory
    monkeypatch.setattr(nvml, "_library", lambda: nvml_stub)
    monkeypatch.setattr(nvml, "has_gpu_build", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml_stub


@pytest.mark.parametrize(
    ("visible", "names", "queried"),
    [
        (None, ["0", "1"], [0, 1, 2]),
        ("1", ["1"], [1]),
        ("1,0", ["1", "0"], [1, 0]),
        ("GPU-8f2c, 0", ["GPU-8f2c", "0"], [b"GPU-8f2c", 0]),
        ("MIG-11", ["MIG-11"], [b"MIG-11"]),
        ("0,5,1", ["0"], [0, 5]),
    ],
)
def test_gpu_memories_follow_cuda_visible_devices(
    library: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    names: list[str],
    queried: list[object],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_memories() == [GpuMemory(free=7 * GB, total=80 * GB, name=name) for name in names]
    assert library.queried == queried


@pytest.mark.parametrize(
    ("capability", "built", "usable"), [((7, 5), True, False), ((8, 0), True, True), ((9, 0), False, False)]
)
def test_gpu_is_usable_if_it_and_pytorch_are_for_the_kernels(
    library: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    built: bool,
    usable: bool,
) -> None:
    def capability_of(device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = capability
        return 0

    library.nvmlDeviceGetCudaComputeCapability = capability_of
    monkeypatch.setattr(nvml, "has_gpu_build", lambda: built)
    assert [gpu.usable for gpu in gpu_memories()] == [usable] * 2


@pytest.mark.parametrize(
    ("line", "built"),
    [
        ("cuda: str | None = None", False),
        ("cuda: Optional[str] = '12.8'", True),
        ('cuda = "13.0"', True),
        ("", False),
    ],
)
def test_build_for_gpus_is_told_by_the_version_of_pytorch(
    line: str, built: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert nvml.has_gpu_build.__wrapped__() is built


@pytest.mark.parametrize("visible", ["", "-1", "5"])
def test_gpu_memories_are_empty_without_visible_gpu(
    library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_memories() == []


def test_gpu_memories_are_empty_when_query_fails(library: SimpleNamespace) -> None:
    library.status = 3
    assert gpu_memories() == []


def test_gpu_memories_are_empty_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    nvml._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    try:
        assert gpu_memories() == []
    finally:
        nvml._library.cache_clear()


def fill(entries: Any, count: Any, values: list[dict[str, int]]) -> int:
    for entry, value in zip(entries, values, strict=False):
        for name, number in value.items():
            setattr(entry, name, number)
    count._obj.value = len(values)
    return 0


def test_gpu_processes_have_their_memory_and_mean_utilization(library: SimpleNamespace) -> None:
    compute = [{"pid": 1, "memory": 5 * GB}, {"pid": 2, "memory": (1 << 64) - 1}]
    graphics = [{"pid": 1, "memory": 4 * GB}, {"pid": 3, "memory": GB}]
    samples = [{"pid": 1, "sm": 20}, {"pid": 1, "sm": 40}, {"pid": 2, "sm": 7}]
    library.nvmlDeviceGetComputeRunningProcesses_v3 = lambda device, count, entries: fill(entries, count, compute)
    library.nvmlDeviceGetGraphicsRunningProcesses_v3 = lambda device, count, entries: fill(entries, count, graphics)
    library.nvmlDeviceGetProcessUtilization = lambda device, entries, count, since: fill(entries, count, samples)
    expected = [GpuProcess(1, 5 * GB, 30.0), GpuProcess(2, 0, 7.0), GpuProcess(3, GB, 0.0)]
    assert gpu_processes() == [expected, expected]
    assert gpu_processes("1") == [expected]
    assert gpu_processes("") == []


def test_gpu_processes_are_unknown_where_the_driver_does_not_list_them(library: SimpleNamespace) -> None:
    for name in ("ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3", "ProcessUtilization"):
        setattr(library, f"nvmlDeviceGet{name}", lambda *_: 3)
    assert gpu_processes() is None
    library.nvmlDeviceGetComputeRunningProcesses_v3 = lambda device, count, entries: fill(entries, count, [{"pid": 1}])
    assert gpu_processes() == [[GpuProcess(1)], [GpuProcess(1)]]  # graphics and utilization are not always supported


def test_gpu_processes_are_unknown_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert gpu_processes() is None
