"""CPU features, cores and memory of this machine. Imports no torch, so that it can run before torch is imported."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

from syringa.engine.cpu import cgroups
from syringa.heap import trim_heap

NO_MEMORY = "no_memory"  # code of errors that may go away once other models are unloaded

SAFE_ISA = "AVX512_CORE_BF16"  # oneDNN's name of the best instruction set without AMX
AMX_PROBE = """
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(a, a)
"""


def cpu_flags() -> set[str]:
    """Return the CPU feature names of /proc/cpuinfo, or an empty set without it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def amx_is_usable() -> bool:
    """Run a bf16 product in a child process: on some machines AMX is advertised, but crashes the process."""
    if not {"amx_tile", "amx_bf16"} <= cpu_flags() or platform.machine() != "x86_64":
        return False
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    try:
        probe = subprocess.run([sys.executable, "-c", AMX_PROBE], env=environment, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


def disable_broken_amx(dtype: str) -> None:
    """Restrict oneDNN to instruction sets below AMX unless AMX works. Must run before torch is imported.

    Only bf16 products use AMX, so only for those the probe, which takes two seconds, is run.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_tile" not in cpu_flags():
        return
    if dtype != "bf16" or not amx_is_usable():
        os.environ["ONEDNN_MAX_CPU_ISA"] = SAFE_ISA


def available_cores(root: Path = Path("/")) -> int:
    """Return the physical cores that this process may use, by its affinity and the container's quota.

    `root`: of the file system that describes the container.
    """
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
    cores = len({_core_of(cpu, root) for cpu in cpus})
    quota = cgroups.cpu_quota(root)
    return cores if quota is None else min(cores, max(1, int(quota)))


def _core_of(cpu: int, root: Path) -> str:
    """Return a name that hyper-threads of the same core share: they also share its arithmetic units."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit.

    `root`: of the file system that describes the machine.
    """
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a system without /proc
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    limited = cgroups.free_memory(root)
    return available if limited is None else min(available, limited)


def release_memory() -> None:
    """Return memory that was freed after loading to the system; the C library would keep it."""
    gc.collect()
    trim_heap()
