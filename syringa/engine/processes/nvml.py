"""GPU memory from the driver's library, NVML.

The supervisor needs it about once a second. Torch would need gigabytes and a CUDA context, `nvidia-smi` up to a second;
NVML answers in microseconds. Some containers lack it: then nothing is known, and workers find out by trying.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

MAX_GPUS = 64


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU in bytes, and its name for CUDA_VISIBLE_DEVICES."""

    free: int
    total: int
    name: str = "0"


class _Info(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memories() -> list[GpuMemory]:
    """Return the memory of the GPUs that workers may use; empty if there are none or they cannot be queried."""
    library = _library()
    if library is None:
        return []
    found = []
    for name in _visible():
        info = _Info()
        device = _device(library, name)
        if device is None or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)):
            break  # CUDA does not see those after it either
        found.append(GpuMemory(free=info.free, total=info.total, name=name))
    return found


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def _visible() -> Iterable[str]:
    """Yield the names of CUDA_VISIBLE_DEVICES, or all indices if that is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
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
