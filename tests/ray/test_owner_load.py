from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from syringa.engine.processes.nvml import GpuProcess
from syringa.fleet.provider import OwnerLoad
from syringa.ray.owner_load import OwnerLoadMeter
from syringa.ray.processes import CLUSTER_DIR_VARIABLE
from tests.ray.fake_driver import Clock
from tests.ray.harness import until

TICKS = os.sysconf("SC_CLK_TCK")
OURS = f"HOME=/root\0{CLUSTER_DIR_VARIABLE}=/x\0"


class Machine:
    """A /proc folder with processes, and GPUs."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.clock = folder, Clock()
        self.gpus: list[list[GpuProcess]] | None = []
        self.meter = OwnerLoadMeter(folder, lambda: self.gpus, self.clock, cores=2)

    def set(
        self,
        pid: int,
        seconds: float,
        environment: str | None = "HOME=/root\0",
        *,
        started: int = 1,
        parent: int = 0,
        session: int = 0,
    ) -> None:
        """A process that has used so many seconds of CPU time."""
        entry = self.proc / str(pid)
        entry.mkdir(exist_ok=True)
        fields = [
            "S",
            str(parent),
            "0",
            str(session),
            *["0"] * 7,
            str(int(seconds * TICKS)),
            "0",
            *["0"] * 6,
            str(started),
            "0",
        ]
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


def test_what_one_of_ours_has_started_or_leads_is_ours_also_without_the_variable(machine: Machine) -> None:
    machine.set(1, 0)
    machine.set(10, 0, parent=1, session=10)  # a shell of the owner, in which the command was typed
    machine.set(11, 0, OURS, parent=10, session=10)
    machine.set(9, 0, "title", parent=11, session=9)  # ids may have begun anew
    machine.set(8, 0, "title", parent=9, session=9)
    machine.set(20, 0, OURS, parent=1, session=20)
    machine.set(21, 0, None, parent=1, session=20)
    machine.set(12, 0, parent=10, session=10)
    machine.measure()
    machine.gpus = [[GpuProcess(pid, memory=pid) for pid in (8, 9, 11, 20, 21)]]
    assert machine.measure() == OwnerLoad()
    machine.gpus = [[GpuProcess(pid, memory=pid) for pid in (1, 10, 12)]]
    assert machine.measure() == OwnerLoad(gpu_memory_bytes=23)


def test_a_process_of_ours_stays_so_when_its_parent_has_ended(machine: Machine) -> None:
    machine.set(1, 0)
    machine.set(2, 0, OURS, parent=1)
    machine.set(3, 0, parent=2)
    machine.measure()
    shutil.rmtree(machine.proc / "2")
    machine.set(3, 10, parent=1)
    assert machine.measure() == OwnerLoad()


@contextlib.contextmanager
def running_without_environment() -> Iterator[list[int]]:
    """Run one of our processes, and yield the ids of two that it has started and whose environment is empty.

    One is in a session of its own, the other one has lost its parent.
    """
    script = "setsid env -i sleep 600 & echo $!; (env -i sleep 600 & echo $!); sleep 600"
    leader = subprocess.Popen(
        ["sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {CLUSTER_DIR_VARIABLE: "/x"},
        start_new_session=True,
    )
    assert leader.stdout is not None
    pids = [int(leader.stdout.readline()) for _ in range(2)]
    try:
        for pid in pids:
            until(lambda entry=Path(f"/proc/{pid}"): (entry / "comm").read_text() == "sleep\n")
            assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        yield pids
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        os.kill(pids[0], signal.SIGKILL)
        leader.communicate()


def test_processes_of_this_machine_that_lost_their_environment_are_ours() -> None:
    with running_without_environment() as pids:
        clock = Clock()
        gpus = [[GpuProcess(pid, memory=1 << 30) for pid in pids]]
        meter = OwnerLoadMeter(gpus=lambda: gpus, clock=clock)
        meter.measure()
        clock.now += 1
        load = meter.measure()
    assert load is not None
    assert load.gpu_memory_bytes == 0


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
