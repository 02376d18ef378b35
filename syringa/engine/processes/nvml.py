"""GPU memory from the driver's library, NVML.

The supervisor needs it about once a second. Torch would need gigabytes and a CUDA context, `nvidia-smi` up to a second;
NVML answers in microseconds. Some containers lack it: then nothing is known, and workers find out by trying.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class GpuMemory:
    """In bytes."""

    free: int
    total: int


class _Info(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory() -> GpuMemory | None:
    """Return the memory of the GPU that a worker would use, or None if there is none or it cannot be queried."""
    library = _library()
    if library is None or (device := _device(library)) is None:
        return None
    info = _Info()
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)):
        return None
    return GpuMemory(free=info.free, total=info.total)


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def _device(library: ctypes.CDLL) -> ctypes.c_void_p | None:
    """Return the first device of CUDA_VISIBLE_DEVICES, or the first one if that is not set."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    device = ctypes.c_void_p()
    if first.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(device))
    elif first.startswith(("GPU-", "MIG-")):
        failed = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(device))
    else:  # no GPU: empty, or -1
        return None
    return None if failed else device
