"""How much memory a GPU has, asked of the driver's own library, as `nvidia-smi` does.

The supervisor asks this every second or so: torch would take gigabytes and a CUDA context for the answer, and starting
`nvidia-smi` up to a second, in which nobody would be attended to. The library answers in microseconds, and is there
wherever a driver is. Where it is not (in some containers), nothing is known, and models find out by trying.
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
    """Of the GPU that a worker would use. None: there is none, or it cannot be known."""
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
    """The first that CUDA would show; without a word of that, the first that there is."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    device = ctypes.c_void_p()
    if first.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(device))
    elif first.startswith(("GPU-", "MIG-")):
        failed = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(device))
    else:  # none at all: empty, or -1
        return None
    return None if failed else device
