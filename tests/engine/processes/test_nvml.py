from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from syringa.engine.processes import nvml
from syringa.engine.processes.nvml import GpuMemory, gpu_memories

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
