"""GPU memory, and the processes on a GPU, from the driver's library, NVML.

The supervisor needs it about once a second. Torch would need gigabytes and a CUDA context, `nvidia-smi` up to a second;
NVML answers in microseconds. Some containers lack it: then nothing is known, and workers find out by trying.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from syringa.engine.gpu import missing_triton

MAX_GPUS = 64
MAX_PROCESSES = 1024  # on one GPU
UTILIZATION_SECONDS = 2.0  # over which the utilization of a process is averaged

MIN_CAPABILITY = (8, 0)  # compute capability with bf16
_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*=\s*['\"]", re.MULTILINE)  # None in builds for CPUs
_NOT_AVAILABLE = (1 << 64) - 1
_NOT_SUPPORTED = 3


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU in bytes, and its name for CUDA_VISIBLE_DEVICES."""

    free: int
    total: int
    name: str = "0"
    usable: bool = True  # by the kernels, as far as the driver tells


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU: the memory that it uses in bytes, and its share of the GPU's time lately."""

    pid: int
    memory: int = 0
    utilization_pct: float = 0.0


class _Info(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _UtilizationSample(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("timestamp", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


def gpu_memories() -> list[GpuMemory]:
    """Return the memory of the GPUs that workers may use; empty if there are none or they cannot be queried."""
    library = _library()
    if library is None:
        return []
    found = []
    for name in _visible(os.environ.get("CUDA_VISIBLE_DEVICES")):
        info = _Info()
        device = _device(library, name)
        if device is None or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)):
            break  # CUDA does not see those after it either
        found.append(GpuMemory(info.free, info.total, name, has_gpu_build() and _is_supported(library, device)))
    return found


def gpu_processes(visible: str | None = None) -> list[list[GpuProcess]] | None:
    """Return the processes on each GPU of `visible`, which is like CUDA_VISIBLE_DEVICES; by default on all GPUs.

    None: they cannot be listed.
    """
    library = _library()
    if library is None:
        return None
    found = []
    for name in _visible(visible):
        device = _device(library, name)
        if device is None:
            break
        memory: dict[int, int] = {}
        for kind in ("Compute", "Graphics"):
            infos, count = (_ProcessInfo * MAX_PROCESSES)(), ctypes.c_uint(MAX_PROCESSES)
            function = getattr(library, f"nvmlDeviceGet{kind}RunningProcesses_v3")
            status = function(device, ctypes.byref(count), infos)
            if status and not (kind == "Graphics" and status == _NOT_SUPPORTED):
                return None
            for info in infos[: 0 if status else count.value]:
                known = 0 if info.memory == _NOT_AVAILABLE else info.memory
                memory[info.pid] = max(memory.get(info.pid, 0), known)
        utilization = _utilization(library, device)
        pids = sorted(memory.keys() | utilization.keys())
        found.append([GpuProcess(pid, memory.get(pid, 0), utilization.get(pid, 0.0)) for pid in pids])
    return found


def _utilization(library: ctypes.CDLL, device: ctypes.c_void_p) -> dict[int, float]:
    """Return the share of the GPU's time of its processes lately, in percent, by their ids."""
    samples, count = (_UtilizationSample * MAX_PROCESSES)(), ctypes.c_uint(MAX_PROCESSES)
    since = ctypes.c_ulonglong(int((time.time() - UTILIZATION_SECONDS) * 1e6))
    if library.nvmlDeviceGetProcessUtilization(device, samples, ctypes.byref(count), since):
        return {}  # nothing has run, or it is not supported
    shares: dict[int, list[int]] = {}
    for sample in samples[: count.value]:
        shares.setdefault(sample.pid, []).append(sample.sm)
    return {pid: sum(values) / len(values) for pid, values in shares.items()}


@cache
def has_gpu_build() -> bool:
    """Whether the installed PyTorch is a CUDA build with Triton. Does not import it."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    try:
        version = Path(folders[0], "version.py").read_text() if folders else ""
    except OSError:
        return True  # its worker finds out
    return missing_triton() is None and _CUDA_VERSION.search(version) is not None


def _is_supported(library: ctypes.CDLL, device: ctypes.c_void_p) -> bool:
    """Whether a GPU is new enough for the kernels."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        failed = library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    except AttributeError:  # an old driver
        return True
    return bool(failed) or (major.value, minor.value) >= MIN_CAPABILITY


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def _visible(listed: str | None) -> Iterable[str]:
    """Yield the names of CUDA_VISIBLE_DEVICES, or all indices if that is not set."""
    return map(str, range(MAX_GPUS)) if listed is None else (name.strip() for name in listed.split(","))


def _device(library: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    if name.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
    elif name.startswith(("GPU-", "MIG-")):
        failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    else:  # no GPU: empty, or -1
        return None
    return None if failed else device
