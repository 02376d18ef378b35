from __future__ import annotations

import os
from pathlib import Path

import pytest

from syringa.engine.processes.nvml import GpuProcess
from syringa.fleet.provider import OwnerLoad
from syringa.ray.owner_load import OwnerLoadMeter
from syringa.ray.processes import CLUSTER_DIR_VARIABLE
from tests.ray.fake_driver import Clock

TICKS = os.sysconf("SC_CLK_TCK")
OURS = f"HOME=/root\0{CLUSTER_DIR_VARIABLE}=/x\0"


class Machine:
    """A /proc folder with processes, and GPUs."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.clock = folder, Clock()
        self.gpus: list[list[GpuProcess]] | None = []
        self.meter = OwnerLoadMeter(folder, lambda: self.gpus, self.clock, cores=2)

    def set(self, pid: int, seconds: float, environment: str | None = "HOME=/root\0", started: int = 1) -> None:
        """A process that has used so many seconds of CPU time."""
        entry = self.proc / str(pid)
        entry.mkdir(exist_ok=True)
        fields = ["S", *["0"] * 10, str(int(seconds * TICKS)), "0", *["0"] * 6, str(started), "0"]
        (entry / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")
        if environment is not None:
            (entry / "environ").write_text(environment)

    def measure(self, seconds: float = 10.0) -> OwnerLoad | None:
        self.clock.now += seconds
        return self.meter.measure()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "meminfo").touch()  # what is no process is ignored
    return Machine(tmp_path)


def test_cpu_time_of_foreign_processes_is_measured_between_two_calls(machine: Machine) -> None:
    machine.set(1, 100)
    machine.set(2, 100, OURS)
    assert machine.measure() is None
    machine.set(1, 105)
    machine.set(2, 120, OURS)
    assert machine.measure() == OwnerLoad(cpu_pct=25.0)  # 5 s of 10 s on 2 cores
    assert machine.measure() == OwnerLoad(cpu_pct=0.0)


def test_processes_of_other_users_are_foreign(machine: Machine) -> None:
    machine.set(1, 0, environment=None)
    machine.measure()
    machine.set(1, 10, environment=None)
    assert machine.measure() == OwnerLoad(cpu_pct=50.0)


def test_a_new_process_counts_whole_also_with_the_id_of_another(machine: Machine) -> None:
    machine.set(1, 50, OURS)
    machine.measure()
    machine.set(1, 4, started=2)
    machine.set(2, 2, started=3)
    assert machine.measure() == OwnerLoad(cpu_pct=30.0)


def test_gpu_memory_and_utilization_are_those_of_foreign_processes(machine: Machine) -> None:
    machine.set(1, 0)
    machine.set(2, 0, OURS)
    machine.measure()
    machine.gpus = [
        [GpuProcess(1, 100, 20.0), GpuProcess(2, 1000, 70.0), GpuProcess(77, 10, 15.0)],
        [GpuProcess(1, 5, 10.0)],
    ]
    assert machine.measure() == OwnerLoad(gpu_utilization_pct=35.0, gpu_memory_bytes=115, cpu_pct=0.0)


def test_a_node_with_gpus_is_not_measured_while_they_cannot_be_seen(machine: Machine) -> None:
    machine.set(1, 0)
    meter = OwnerLoadMeter(machine.proc, lambda: machine.gpus, machine.clock, cores=2, has_gpus=True)
    loads = []
    seen: list[list[list[GpuProcess]] | None] = [[[]], [[]], [], None, [[GpuProcess(1, 100)]]]
    for machine.gpus in seen:
        machine.clock.now += 10
        loads.append(meter.measure())
    assert loads == [None, OwnerLoad(), None, None, OwnerLoad(gpu_memory_bytes=100)]


def test_a_node_without_gpus_is_measured_by_its_cpu_alone(machine: Machine) -> None:
    machine.set(1, 0)
    machine.gpus = None
    assert [machine.measure(), machine.measure()] == [None, OwnerLoad()]


def test_a_system_without_proc_is_not_measured(tmp_path: Path) -> None:
    meter = OwnerLoadMeter(tmp_path / "missing", list)
    assert meter.measure() is None
    assert meter.measure() is None


def test_this_machine_can_be_measured() -> None:
    clock = Clock()
    meter = OwnerLoadMeter(clock=clock)
    meter.measure()
    clock.now += 1
    load = meter.measure()
    assert load is not None
    assert 0 <= load.cpu_pct <= 100
