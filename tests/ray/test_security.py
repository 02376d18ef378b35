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
from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.cluster.own_address import own_address
from syringa.ray.processes import environment
from tests.ray.harness import LocalCluster, cluster_folder, processes_with

pytestmark = pytest.mark.slow

TOKEN_REFUSED = "refuses the token of this cluster"


def run_foreign(what: str, address: str, variables: dict[str, str]) -> str:
    """Return what a foreign program prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "_SYRINGA"))}
    command = [sys.executable, "-m", "tests.ray.foreign", what, address]
    result = subprocess.run(command, env=plain | variables, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    return result.stdout


def listening(cluster: LocalCluster) -> set[int]:
    """Return the TCP ports on which the processes of a cluster listen, of all addresses."""
    inodes = set()
    for pid in processes_with("_SYRINGA_NODE_FOLDER", cluster.temp):
        with contextlib.suppress(OSError):  # the process may have ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.fixture(scope="module", autouse=True)
def node(cluster: LocalCluster) -> None:
    cluster.add("a")


def test_a_member_of_the_cluster_is_accepted(cluster: LocalCluster) -> None:
    assert run_foreign("look", cluster.address, cluster.variables) == "2 nodes\n"
    assert run_foreign("connect", cluster.address, cluster.variables) == "ran\n"


def test_a_driver_with_the_certificate_but_without_the_token_is_refused(cluster: LocalCluster) -> None:
    variables = {**cluster.variables, "RAY_AUTH_MODE": "disabled"}
    assert TOKEN_REFUSED in run_foreign("look", cluster.address, variables)
    assert "ran" not in run_foreign("connect", cluster.address, variables).split()


def test_a_driver_with_another_token_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
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


def test_connections_without_a_certificate_of_the_cluster_are_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    assert handshake(cluster.address, cluster.folder, cluster.folder)  # the settings of HTTP/2
    foreign = cluster_folder(tmp_path / "foreign")
    for folder in (None, foreign):
        assert handshake(cluster.address, folder, cluster.folder) == b""
    with socket.create_connection((own_address(), cluster.port), 120) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        with contextlib.suppress(ConnectionResetError):  # instead of an end
            assert plain.recv(100) == b""


def test_no_port_takes_a_job(cluster: LocalCluster) -> None:
    """`ray job submit` posts to the dashboard or to an agent of a node. Neither is there, on any port."""
    ports = listening(cluster)
    assert cluster.port in ports
    body = json.dumps({"entrypoint": "touch /tmp/ran"})
    for port in ports:
        connection = http.client.HTTPConnection(own_address(), port, timeout=30)
        try:
            connection.request("POST", "/api/jobs/", body, {"Content-Type": "application/json"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
        assert status in (401, 403), f"port {port}"


def test_ray_job_submit_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for port in (8265, *listening(cluster)):
        command = ["job", "submit", "--address", f"http://{own_address()}:{port}", "--", "touch", str(mark)]
        result = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *command], capture_output=True, timeout=300, check=False
        )
        assert result.returncode != 0
        if b"No such command" in result.stderr or b"No module named" in result.stderr:
            break  # a Ray without the extra for jobs: the ports were tried above
    assert not mark.exists()


def test_another_cluster_does_not_accept_the_token_of_this_one(tmp_path: Path) -> None:
    one, two = (cluster_folder(tmp_path / name) for name in ("one", "two"))
    assert one.ray_token.read_text() != two.ray_token.read_text()
    assert environment(one)["RAY_AUTH_TOKEN_PATH"] != environment(two)["RAY_AUTH_TOKEN_PATH"]
