"""The processes that a supervisor has on a cluster: started, restarted and ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config, ModelSpec, complete_spec
from syringa.engine.processes import fleet_services
from syringa.engine.processes.fleet_manager import FleetManager
from syringa.engine.processes.supervisor import Supervisor

HANG_SECONDS = 240.0


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.02)


@contextlib.contextmanager
def running(config: Config) -> Iterator[tuple[Supervisor, list[int]]]:
    """Run a supervisor without API servers in a thread. Yield it and its exit status, once it has one."""
    status: list[int] = []
    spec = complete_spec(ModelSpec(id="m", path="m"), config, default=True)
    with tempfile.TemporaryDirectory(prefix="syringa-test-") as folder, socket.socket() as listener:
        supervisor = Supervisor(config, spec, listener, folder)
        supervisor.api_servers = []
        thread = threading.Thread(target=lambda: status.append(supervisor.run(lambda info: None)))
        thread.start()
        try:
            yield supervisor, status
        finally:
            supervisor.stopping = True
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_services, "BRIDGE_MODULE", "tests.engine.processes.stub_bridge")


def pids(supervisor: Supervisor) -> list[int]:
    return [process.pid for each in supervisor.services if (process := each.process) is not None]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_connected(supervisor: Supervisor) -> bool:
    assert isinstance(supervisor.workers, FleetManager)
    return supervisor.workers.provider.connected


def test_bridge_is_restarted_and_ends_with_the_supervisor() -> None:
    with running(Config(model="/nowhere", cluster=True)) as (supervisor, status):
        wait_for(lambda: is_connected(supervisor))
        (first,) = pids(supervisor)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: pids(supervisor) not in ([], [first]) and is_connected(supervisor))
        (second,) = pids(supervisor)
    assert status == [0]
    assert not exists(second)


def test_bridge_that_can_never_start_ends_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    with running(Config(model="/nowhere", cluster=True, cluster_dir="broken")) as (_, status):
        wait_for(lambda: status)
    assert status == [1]
    assert capfd.readouterr().err.splitlines()[-1] == "syringa: Ray is not installed"


def test_cluster_server_ends_with_the_supervisor(tmp_path: Path) -> None:
    ClusterFolder(tmp_path / "cluster").create("test", ["127.0.0.1"])
    config = Config(
        model="/nowhere", cluster=True, cluster_dir=str(tmp_path / "cluster"), cluster_address="127.0.0.1:0"
    )
    with running(config) as (supervisor, status):
        wait_for(lambda: is_connected(supervisor))
        assert [each.name for each in supervisor.services] == ["bridge", "cluster server"]
        ids = pids(supervisor)
        assert len(ids) == 2
        assert [each.starts for each in supervisor.services] == [1, 1]
    assert status == [0]
    assert not any(exists(pid) for pid in ids)


@pytest.mark.parametrize("fails", [True, False])
def test_supervisor_that_fails_leaves_its_replicas(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(cluster=True, cluster_dir="/nowhere")
    spec = complete_spec(ModelSpec(id="m", path="m"), config, default=True)
    left: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="syringa-test-") as folder, socket.socket() as listener:
        supervisor = Supervisor(config, spec, listener, folder)
        supervisor.api_servers, supervisor.services = [], []
        end = supervisor.workers.stop

        def stop(grace: float, *, leave_replicas: bool = False) -> None:
            left.append(leave_replicas)
            end(0.0, leave_replicas=leave_replicas)

        def tick() -> None:
            if fails:
                raise ValueError("a bug")
            supervisor.stopping = True

        monkeypatch.setattr(supervisor.workers, "stop", stop)
        monkeypatch.setattr(supervisor.workers, "tick", tick)
        if fails:
            with pytest.raises(ValueError, match="a bug"):
                supervisor.run(lambda info: None)
        else:
            assert supervisor.run(lambda info: None) == 0
    assert left == [fails]
