"""What is refused by the Ray of a cluster: its ports run code for everything that they accept."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.cluster.own_address import own_address
from syringa.ray.processes import RayProcess, environment, head_arguments, node_arguments, wait_started
from tests.ray.harness import GUARD_SECONDS, cluster_folder, free_port

pytestmark = pytest.mark.slow

TOKEN_REFUSED = "refuses the token of this cluster"
# Lets Ray find its extras in the processes that run `ray start`, and nowhere else.
EXTRAS_INSTALLED = """
import sys, types

if "syringa.ray.processes" in sys.orig_argv:
    for name in ("grpc", "ray.dashboard.optional_deps"):
        sys.modules[name] = types.ModuleType(name)
"""


class StartedCluster:
    """A head as `syringa cluster start` starts it, and a node, on a machine that has the extras of Ray."""

    def __init__(self, path: Path) -> None:
        self.folder, self.port = cluster_folder(path / "cluster"), free_port()
        self.address = f"{own_address()}:{self.port}"
        self.variables = environment(self.folder)
        (path / "sitecustomize.py").write_text(EXTRAS_INSTALLED)
        paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._variables = {**self.variables, "PYTHONPATH": os.pathsep.join(paths)}
        self._processes: list[RayProcess] = []

    def start(self) -> None:
        self._add(RayProcess("the head", head_arguments(own_address(), self.port), self._variables), "1 nodes\n")
        arguments = node_arguments(self.address, own_address(), "a", {}, member="a", cpus=1, gpus=0)
        self._add(RayProcess("the node", arguments, self._variables), "2 nodes\n")

    def _add(self, process: RayProcess, nodes: str) -> None:
        self._processes.append(process)
        wait_started(process, lambda: run_foreign("look", self.address, self.variables) == nodes, GUARD_SECONDS)

    def processes(self) -> list[Path]:
        """Return the folders in /proc of all processes of Ray, by their sessions: some overwrite their environment."""
        sessions, found = {each.process.pid for each in self._processes}, []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                found += [entry] if os.getsid(int(entry.name)) in sessions else []
        return found

    def commands(self) -> list[list[str]]:
        """Return the command lines of all processes of Ray."""
        found = []
        for entry in self.processes():
            with contextlib.suppress(OSError):
                found.append((entry / "cmdline").read_bytes().decode(errors="replace").split("\0"))
        return found

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedCluster]:
    started = StartedCluster(tmp_path_factory.mktemp("cluster"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


def run_foreign(what: str, address: str, variables: dict[str, str]) -> str:
    """Return what a foreign program prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "_SYRINGA"))}
    command = [sys.executable, "-m", "tests.ray.foreign", what, address]
    result = subprocess.run(command, env=plain | variables, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    return result.stdout


def listening(cluster: StartedCluster) -> set[int]:
    """Return the TCP ports on which the processes of a cluster listen, of all addresses."""
    inodes = set()
    for process in cluster.processes():
        with contextlib.suppress(OSError):  # the process may have ended
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_a_member_of_the_cluster_is_accepted(cluster: StartedCluster) -> None:
    assert run_foreign("look", cluster.address, cluster.variables) == "2 nodes\n"
    assert run_foreign("connect", cluster.address, cluster.variables) == "ran\n"


def test_a_driver_with_the_certificate_but_without_the_token_is_refused(cluster: StartedCluster) -> None:
    variables = {**cluster.variables, "RAY_AUTH_MODE": "disabled"}
    assert TOKEN_REFUSED in run_foreign("look", cluster.address, variables)
    assert "ran" not in run_foreign("connect", cluster.address, variables).split()


def test_a_driver_with_another_token_is_refused(cluster: StartedCluster, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    variables = {**cluster.variables, "RAY_AUTH_TOKEN_PATH": str(token)}
    assert TOKEN_REFUSED in run_foreign("look", cluster.address, variables)


def handshake(address: str, folder: ClusterFolder | None, trust: ClusterFolder) -> bytes:
    """Begin HTTP/2 with a certificate of a cluster or none, and return what the server answers; empty: it refuses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(trust.ray_files().ca)
    context.set_alpn_protocols(["h2"])
    if folder is not None:
        context.load_cert_chain(folder.ray_files().certificate, folder.ray_files().key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 120) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        try:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            return connection.recv(100)
        except (ssl.SSLError, ConnectionError):  # with TLS 1.3, the server refuses after the handshake
            return b""


def test_connections_without_a_certificate_of_the_cluster_are_refused(cluster: StartedCluster, tmp_path: Path) -> None:
    assert handshake(cluster.address, cluster.folder, cluster.folder)  # the settings of HTTP/2
    foreign = cluster_folder(tmp_path / "foreign")
    for folder in (None, foreign):
        assert handshake(cluster.address, folder, cluster.folder) == b""
    with socket.create_connection((own_address(), cluster.port), 120) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        with contextlib.suppress(ConnectionResetError):  # instead of an end
            assert plain.recv(100) == b""


def submit(port: int, path: str, headers: dict[str, str]) -> int:
    """Post a job, and return the status of the answer; 0 if the port does not answer as HTTP."""
    connection = http.client.HTTPConnection(own_address(), port, timeout=30)
    try:
        body = json.dumps({"entrypoint": "touch /tmp/ran"})
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def test_no_port_takes_a_job(cluster: StartedCluster) -> None:
    """Jobs are posted to the dashboard or to an agent of a node. Neither takes any, also not from a member."""
    ports = listening(cluster)
    assert cluster.port in ports
    token = {"Authorization": f"Bearer {cluster.folder.ray_token.read_text().strip()}"}
    for port in ports:
        for path in ("/api/jobs/", "/api/job_agent/jobs/"):
            found = submit(port, path, {}), submit(port, path, token)
            assert found in ((0, 0), (401, 404)), f"port {port}"


def test_extras_of_ray_that_are_installed_open_no_ports(cluster: StartedCluster) -> None:
    commands = cluster.commands()
    assert not [each for each in commands if "ray.util.client.server" in each]
    agents = [each for each in commands if any("/dashboard/agent.py" in argument for argument in each)]
    assert agents
    assert all("--minimal" in " ".join(each) for each in agents)  # no server for jobs, and none for metrics
    dashboards = [each for each in commands if any(argument.endswith("/dashboard.py") for argument in each)]
    assert all("--minimal" in each for each in dashboards)


def test_ray_job_submit_is_refused(cluster: StartedCluster, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    reasons = ("Failed to connect to Ray", "no authentication token was found", "Jobs API is not supported")
    for port in (8265, *listening(cluster)):
        for variables in ({}, cluster.variables):
            command = ["job", "submit", "--address", f"http://{own_address()}:{port}", "--", "touch", str(mark)]
            result = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *command],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            if "require the ray[default] installation" in result.stdout:
                pytest.skip("this Ray has no jobs; the ports are tried by another test")
            assert result.returncode != 0
            assert any(each in result.stdout for each in reasons), result.stdout
    assert not mark.exists()


def test_another_cluster_does_not_accept_the_token_of_this_one(tmp_path: Path) -> None:
    one, two = (cluster_folder(tmp_path / name) for name in ("one", "two"))
    assert one.ray_token.read_text() != two.ray_token.read_text()
    assert environment(one)["RAY_AUTH_TOKEN_PATH"] != environment(two)["RAY_AUTH_TOKEN_PATH"]
