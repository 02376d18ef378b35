"""What the processes of a machine's owner use: all that do not belong to a node of a cluster.

Our processes are recognized by a variable of their environment, which each inherits from the node that it belongs to.
Some, as those of vLLM, overwrite their environment with a title: what one of ours has started, and what is in a session
that one of ours leads, is ours too. Processes of other users, whose environment cannot be read, are the owner's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from syringa.engine.processes.nvml import GpuProcess, gpu_processes
from syringa.fleet.provider import OwnerLoad
from syringa.ray.processes import CLUSTER_DIR_VARIABLE

_MARK = f"{CLUSTER_DIR_VARIABLE}=".encode()


class _Process(NamedTuple):
    started: int  # together with its id, what identifies a process
    ours: bool
    ticks: int  # of CPU time
    parent: int
    session: int  # the id of the process that leads it


class OwnerLoadMeter:
    """Measures the load between two calls of `measure`."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        gpus: Callable[[], Sequence[Sequence[GpuProcess]] | None] = gpu_processes,
        clock: Callable[[], float] = time.monotonic,
        cores: int | None = None,
        has_gpus: bool = False,
    ) -> None:
        """`has_gpus`: the node offers GPUs; without a look at them, its load is not known."""
        self._proc, self._gpus, self._clock, self._has_gpus = proc, gpus, clock, has_gpus
        self._capacity = os.sysconf("SC_CLK_TCK") * (cores or os.cpu_count() or 1)  # ticks per second
        self._processes: dict[int, _Process] = {}
        self._measured_at: float | None = None

    def measure(self) -> OwnerLoad | None:
        """Return the load since the last call; None the first time, and where it cannot be measured."""
        now, before = self._clock(), self._processes
        self._processes = self._read()
        if not self._processes:
            return None
        measured_at, self._measured_at = self._measured_at, now
        if measured_at is None or now <= measured_at:
            return None
        ticks = 0
        for pid, process in self._processes.items():
            if not process.ours:
                known = before.get(pid)
                same = known is not None and known.started == process.started
                ticks += process.ticks - (known.ticks if known is not None and same else 0)
        cpu = 100 * ticks / (self._capacity * (now - measured_at))
        gpus = self._gpus()
        if self._has_gpus and not gpus:
            return None
        memory, utilization = self._measure_gpus(gpus or ())
        return OwnerLoad(gpu_utilization_pct=utilization, gpu_memory_bytes=memory, cpu_pct=min(100.0, cpu))

    def _measure_gpus(self, gpus: Sequence[Sequence[GpuProcess]]) -> tuple[int, float]:
        """Return the GPU memory of foreign processes in bytes, and their utilization of the busiest GPU in percent."""
        memory, utilization = 0, 0.0
        for processes in gpus:
            foreign = [each for each in processes if not self._is_ours(each.pid)]
            memory += sum(each.memory for each in foreign)
            utilization = max(utilization, sum(each.utilization_pct for each in foreign))
        return memory, min(100.0, utilization)

    def _is_ours(self, pid: int) -> bool:
        process = self._processes.get(pid)
        return process is not None and process.ours

    def _read(self) -> dict[int, _Process]:
        found = {}
        for entry in self._proc.iterdir() if self._proc.is_dir() else ():
            if not entry.name.isdigit():
                continue
            pid = int(entry.name)
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                ticks, started = int(fields[11]) + int(fields[12]), int(fields[19])
                parent, session = int(fields[1]), int(fields[3])
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
            known = self._processes.get(pid)
            same = known is not None and known.started == started
            ours = known.ours if known is not None and same else self._is_marked(entry)
            found[pid] = _Process(started, ours, ticks, parent, session)
        return _with_descendants(found)

    @staticmethod
    def _is_marked(entry: Path) -> bool:
        try:
            return any(each.startswith(_MARK) for each in (entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            return False


def _with_descendants(processes: dict[int, _Process]) -> dict[int, _Process]:
    """Mark what belongs to one of our processes, by its parent or by its session, as ours."""
    followers: dict[int, list[int]] = {}
    for pid, process in processes.items():
        for leader in {process.parent, process.session}:
            followers.setdefault(leader, []).append(pid)
    found = [pid for pid, process in processes.items() if process.ours]
    ours = set(found)
    while found:
        new = set(followers.get(found.pop(), ())) - ours
        ours |= new
        found += new
    return {pid: process._replace(ours=pid in ours) for pid, process in processes.items()}
