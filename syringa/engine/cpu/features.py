"""What this processor can really do, found out before torch loads. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

NO_MEMORY = "no_memory"  # the code of an error that may not come again when others have left

# oneDNN's names for instruction sets, from which the highest without AMX is chosen.
SAFE_ISA = "AVX512_CORE_BF16"
AMX_PROBE = """
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(a, a)
"""


def cpu_flags() -> set[str]:
    """The feature names that the system reports, in Linux's spelling; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def amx_is_usable() -> bool:
    """Runs a bf16 product in a child process: some machines advertise AMX, grant it, and then die of it."""
    if not {"amx_tile", "amx_bf16"} <= cpu_flags() or platform.machine() != "x86_64":
        return False
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    try:
        probe = subprocess.run([sys.executable, "-c", AMX_PROBE], env=environment, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


def guard_against_amx(dtype: str) -> None:
    """Caps oneDNN below AMX unless AMX works. Must run before torch is imported.

    Only bf16 products would use AMX, so only for those is the probe (two seconds) worth its time.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_tile" not in cpu_flags():
        return
    if dtype != "bf16" or not amx_is_usable():
        os.environ["ONEDNN_MAX_CPU_ISA"] = SAFE_ISA


def available_cores() -> int:
    """Cores this process may use: its affinity, or a container's quota if that is less. Hyper-threads count once."""
    try:
        mine = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
    cores = len({_core_of(cpu) for cpu in mine})
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def _core_of(cpu: int) -> str:
    """A name that the threads of one core share: two threads on one core only share its arithmetic units."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def available_memory() -> int:
    """Bytes that can be taken without swapping, respecting a container's limit."""
    available = 4 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def release_memory() -> None:
    """Hands what loading has freed back to the system; the C library would keep it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has this
        ctypes.CDLL(None).malloc_trim(0)
