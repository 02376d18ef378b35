from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from syringa.engine.processes import nvml
from syringa.engine.processes.nvml import GpuMemory, gpu_memory

GB = 1 << 30


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The driver's library on a machine with two GPUs; `asked` is which one was wanted."""
    made = SimpleNamespace(asked=[], status=0)

    def by_index(index: ctypes.c_uint, device: Any) -> int:
        made.asked.append(index.value)
        return 0 if index.value < 2 else 2

    def by_uuid(name: bytes, device: Any) -> int:
        made.asked.append(name)
        return 0

    def memory(device: Any, info: Any) -> int:
        info._obj.total, info._obj.free = 80 * GB, 7 * GB
        return int(made.status)

    made.nvmlDeviceGetHandleByIndex_v2, made.nvmlDeviceGetHandleByUUID = by_index, by_uuid
    made.nvmlDeviceGetMemoryInfo = memory
    monkeypatch.setattr(nvml, "_library", lambda: made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, 0), ("1", 1), ("1,0", 1), ("GPU-8f2c,0", b"GPU-8f2c"), ("MIG-11", b"MIG-11")],
)
def test_the_gpu_that_a_worker_would_use(
    library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: object
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_memory() == GpuMemory(free=7 * GB, total=80 * GB)
    assert library.asked == [asked]


@pytest.mark.parametrize("visible", ["", "-1", "5"])
def test_no_gpu_that_may_be_seen(library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_memory() is None


def test_a_driver_that_does_not_say(library: SimpleNamespace) -> None:
    library.status = 3
    assert gpu_memory() is None


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    nvml._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    try:
        assert gpu_memory() is None
    finally:
        nvml._library.cache_clear()
