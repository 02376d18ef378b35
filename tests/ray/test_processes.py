from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.errors import ConfigError
from syringa.ray import processes
from syringa.ray.processes import RayProcess
from tests.e2e.server import alive
from tests.ray.harness import until


@contextlib.contextmanager
def running_script(
    script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, watched: str = ""
) -> Iterator[RayProcess]:
    """A shell script in the place of Ray."""
    program = folder / "ray"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        process = RayProcess("the node", [], {}, watched)
    try:
        yield process
    finally:
        process.stop()


def test_processes_that_overwrote_their_environment_are_killed_with_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_script("env -i sleep 600 &\necho $!\nwait", tmp_path, monkeypatch) as node:
        child = int(until(lambda: node.log.read_text().strip()))
        os.kill(node.process.pid, signal.SIGKILL)
        until(lambda: not node.running)
        assert alive(child)
        node.stop()
        until(lambda: not alive(child))


def test_process_has_ended_when_its_program_has_though_ray_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `ray stop`, which sends SIGTERM."""
    monkeypatch.setattr(processes, "WATCH_SECONDS", 0.0)
    (tmp_path / processes.GCS).symlink_to(sys.executable)
    program = f"'{tmp_path / processes.GCS}' -I -c 'import time; time.sleep(600)'"
    with running_script(f"{program} &\necho $!\nwait\nsleep 600", tmp_path, monkeypatch, processes.GCS) as head:
        child = int(until(lambda: head.log.read_text().strip()))
        until(lambda: head.running and head._watched == child)
        os.kill(child, signal.SIGTERM)
        until(lambda: not head.running)
        assert head.process.poll() is None
        assert head.failure() == "gcs_server has ended"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Ray runtime started.; kill -9 $$", "signal SIGKILL, perhaps out of memory"),
        ("echo 'raylet [exit code=1]'; echo Remaining processes will be killed.; exit 1", "raylet [exit code=1]"),
        ("echo ValueError: bad; echo Stopped.; exit 1", "ValueError: bad"),
        ("echo Stopped.; exit 1", "Stopped."),
        ("exit 3", "exit=3"),
    ],
)
def test_failure_is_a_signal_or_the_line_of_ray_with_the_cause(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_script(script, tmp_path, monkeypatch) as node:
        until(lambda: not node.running)
        assert node.failure() == reason


def test_environment_requires_a_token_and_tls_of_rays_own_authority(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    variables = processes.environment(folder)
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray.token")
    assert variables["RAY_USE_TLS"] == "1"
    assert {variables[f"RAY_TLS_{name}"] for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")} == {
        str(tmp_path / "ray" / name) for name in ("node.pem", "node.key", "ca.pem")
    }
    assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
    assert variables["RAY_enable_metrics_collection"] == "false"
    assert "RAY_REDIS_ADDRESS" not in variables


def test_nodes_wait_for_a_head_as_long_as_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    assert processes.environment(ClusterFolder(tmp_path))[name] == str(processes.RECONNECT_SECONDS)
    monkeypatch.setenv(name, "7")
    assert processes.environment(ClusterFolder(tmp_path))[name] == "7"
    assert processes.reconnect_seconds() == 7


def test_environment_names_an_external_redis(tmp_path: Path) -> None:
    namespaces = set()
    for user in ("ada", "bob"):
        folder = ClusterFolder(tmp_path / user / "cluster")
        (folder.path / "ray").mkdir(parents=True)
        Path(folder.ray_files().ca).write_text(f"authority of {user}")
        variables = processes.environment(folder, redis="10.0.0.9:6379")
        assert variables["RAY_REDIS_ADDRESS"] == "10.0.0.9:6379"
        namespaces.add(variables["RAY_external_storage_namespace"])
    assert len(namespaces) == 2  # clusters with folders of the same name share nothing


def test_a_time_to_wait_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10m")
    with pytest.raises(ConfigError, match="RAY_gcs_rpc_server_reconnect_timeout_s='10m': expected a number"):
        processes.environment(ClusterFolder(tmp_path))


def test_head_has_no_dashboard_and_no_resources() -> None:
    arguments = processes.head_arguments("10.0.0.1", 6379)
    assert {"--head", "--port=6379", "--include-dashboard=false", "--num-cpus=0", "--num-gpus=0"} <= set(arguments)


def test_node_has_its_labels_and_resources() -> None:
    arguments = processes.node_arguments("h:1", "10.0.0.2", "n", {"pool": "x", "zone": "a"}, member="42", cpus=3)
    assert {"--address=h:1", "--node-ip-address=10.0.0.2", "--node-name=n", "--num-cpus=3"} <= set(arguments)
    assert "--labels=pool=x,zone=a,syringa-member=42" in arguments
    assert not any(each.startswith("--num-gpus") for each in arguments)
