"""Nodes join a cluster over HTTPS: what they get, and when they are refused."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from syringa.cluster import join as join_module
from syringa.cluster.admission import JoinRequest, NodeAdmission, peer_address
from syringa.cluster.authority import hosts_of, serial_of
from syringa.cluster.folder import ClusterFolder, replace_file
from syringa.cluster.join import DEFAULT_PORT, Membership, join, parse_server_address, read_membership, renew
from syringa.cluster.join_tokens import JoinTokens, parse_token
from syringa.cluster.tls import client_context, server_context
from syringa.errors import ConfigError, Forbidden, InvalidRequest
from tests.cluster.serving import HANG_SECONDS, RunningCluster, running_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path, ray_port=6380) as running:
        yield running


def used(cluster: RunningCluster) -> list[str]:
    return [each.used_by for each in JoinTokens(cluster.folder).records()]


def test_join_creates_a_folder_with_the_certificates_of_the_node(cluster: RunningCluster, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "node"
    membership = join(cluster.address, cluster.token(), folder, name="gpu-1", hosts=["gpu-1.example", "127.0.0.1"])
    assert membership == Membership("gpu-1", cluster.address, 6380) == read_membership(folder)
    assert sorted(each.name for each in folder.iterdir()) == [
        "ca.pem", "node.json", "node.key", "node.pem", "ray", "ray.token", "server.key", "server.pem",
    ]  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.glob("*.key")} == {0o600}
    files = ClusterFolder(folder)
    server_context(files.files("server"))
    client_context(files.files("node"))
    assert hosts_of((folder / "server.pem").read_bytes()) == ["gpu-1.example", "127.0.0.1"]
    assert (folder / "ca.pem").read_bytes() == (cluster.folder / "ca.pem").read_bytes()
    assert read_membership(cluster.folder) is None
    assert used(cluster) == ["gpu-1"]


def test_join_brings_what_ray_needs(cluster: RunningCluster, tmp_path: Path) -> None:
    node = ClusterFolder(cluster.join(tmp_path / "node"))
    node.check_ray()
    assert node.ray_token.read_bytes() == ClusterFolder(cluster.folder).ray_token.read_bytes()
    assert sorted(each.name for each in (node.path / "ray").iterdir()) == ["ca.pem", "node.key", "node.pem"]
    assert (node.path / "ray" / "ca.pem").read_bytes() == (cluster.folder / "ray" / "ca.pem").read_bytes()
    assert {stat.S_IMODE(each.stat().st_mode) for each in (node.ray_token, node.path / "ray" / "node.key")} == {0o600}
    assert hosts_of((node.path / "ray" / "node.pem").read_bytes()) == ["127.0.0.1"]


def test_join_works_without_ray(cluster: RunningCluster, tmp_path: Path) -> None:
    shutil.rmtree(cluster.folder / "ray")
    assert not (cluster.join(tmp_path / "node") / "ray").exists()


def test_token_is_refused_a_second_time(cluster: RunningCluster, tmp_path: Path) -> None:
    token = cluster.token()
    join(cluster.address, token, tmp_path / "one", name="one")
    with pytest.raises(ConfigError, match="refuses: the join token was used before, by one"):
        join(cluster.address, token, tmp_path / "two", name="two")
    assert not (tmp_path / "two").exists()


def test_token_is_not_sent_to_the_server_of_another_cluster(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joining machine compares fingerprints first: the other server sees a request for its certificate only."""
    requests: list[str] = []
    with running_cluster(tmp_path / "other", fresh=True) as other:
        monkeypatch.setattr(other.server.admission, "admit", lambda request, peer: requests.append("join"))
        with pytest.raises(ConfigError, match=r"not the server that the join token is for.*was not sent"):
            join(other.address, cluster.token(), tmp_path / "node", name="node")
    assert requests == []
    assert used(cluster) == [""]


def test_token_is_not_sent_to_a_server_that_repeats_the_authority_of_the_cluster(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    """`/ca` is public. A server that has no certificate of it is refused by the second connection."""
    with running_cluster(tmp_path / "other", fresh=True) as other:
        other.server.authority = (cluster.folder / "ca.pem").read_bytes()
        with pytest.raises(ConfigError, match="not from the authority of this cluster"):
            join(other.address, cluster.token(), tmp_path / "node", name="node")


def test_token_is_not_sent_to_a_node_that_poses_as_the_server(cluster: RunningCluster, tmp_path: Path) -> None:
    """Its certificate is one of the cluster, and for another host."""
    authority = ClusterFolder(cluster.folder).authority()
    pair = authority.issue("node", roles={"server"}, hosts=["node.example"])
    replace_file(cluster.folder / "server.pem", pair.certificate)
    replace_file(cluster.folder / "server.key", pair.key)
    with pytest.raises(ConfigError, match="for another host"):
        join(cluster.address, cluster.token(), tmp_path / "node", name="node")


def test_folder_with_content_is_not_overwritten_and_costs_no_token(cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "file").touch()
    with pytest.raises(ConfigError, match="not overwritten"):
        join(cluster.address, cluster.token(), tmp_path / "node", name="node")
    assert used(cluster) == [""]


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """A port that answers to whatever is sent, without TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(HANG_SECONDS)
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # closed with unread bytes, it would be reset, and the answer lost
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(HANG_SECONDS)


def test_unreachable_or_foreign_server_is_one_line(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_module, "START_SECONDS", 0.0)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ConfigError, match="cannot be reached: Connection refused"):
            join(f"127.0.0.1:{bound.getsockname()[1]}", cluster.token(), tmp_path / "node", name="node")
    no_tls = pytest.raises(ConfigError, match="cannot be reached: it does not use TLS")
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as plain, no_tls:
        join(plain, cluster.token(), tmp_path / "node", name="node")

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match="cannot be reached: Name or service not known"):
        join("host.invalid:1", cluster.token(), tmp_path / "node", name="node")


def test_server_that_is_being_started_is_waited_for(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_module, "START_SECONDS", HANG_SECONDS)
    port = parse_server_address(cluster.address).port
    refused = 0
    connect = http.client.HTTPSConnection.connect

    def refuse_twice(connection: http.client.HTTPSConnection) -> None:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise ConnectionRefusedError
        connect(connection)

    monkeypatch.setattr(http.client.HTTPSConnection, "connect", refuse_twice)
    assert join(f"127.0.0.1:{port}", cluster.token(), tmp_path / "node", name="node").name == "node"
    assert refused == 2


def test_address_of_the_server_is_parsed() -> None:
    assert parse_server_address("head") == ("head", DEFAULT_PORT)
    assert parse_server_address("head.example:90") == ("head.example", 90)
    assert str(parse_server_address("[::1]:90")) == "[::1]:90"
    assert parse_server_address("[::1]") == ("::1", DEFAULT_PORT)
    assert parse_server_address("head:0", listening=True) == ("head", 0)
    for text in ("", ":1", "::1", "a:b", "a:0", "a:65536", "https://a:1", "a b:1", "a@b:1", "[::1]x:1"):
        with pytest.raises(ConfigError, match="expected HOST or HOST:PORT"):
            parse_server_address(text)


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_node_renews_its_certificates(cluster: RunningCluster, tmp_path: Path) -> None:
    folder = cluster.join(tmp_path / "node", "gpu-1")
    before = read_all(folder)
    assert renew(folder).name == "gpu-1"
    after = read_all(folder)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"server.pem", "server.key", "node.pem", "node.key", "ray/node.pem", "ray/node.key"}
    assert hosts_of(after["server.pem"]) == hosts_of(before["server.pem"])
    with pytest.raises(ConfigError, match="has not joined"):
        renew(cluster.folder)


def test_node_renews_with_its_last_certificate_or_the_one_before(cluster: RunningCluster, tmp_path: Path) -> None:
    folder, copy = cluster.join(tmp_path / "node"), tmp_path / "copy"
    shutil.copytree(folder, copy)
    renew(folder)
    renew(copy)  # as if the answer had been lost
    with pytest.raises(ConfigError, match="was replaced by another: it has to join again"):
        renew(folder)
    renew(copy)


def test_machine_does_not_renew_the_certificates_of_a_node_that_has_moved(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    old = cluster.join(tmp_path / "old", "a")
    join(cluster.address, cluster.token(node="a"), tmp_path / "new", name="a", hosts=["new.example"])
    before = read_all(old)
    with pytest.raises(ConfigError, match="was replaced by another"):
        renew(old)
    assert read_all(old) == before
    renew(tmp_path / "new")


def test_renewal_does_not_contain_the_token_of_ray(folder: Path) -> None:
    secret = parse_token(JoinTokens(folder).create()).secret
    joined = NodeAdmission(folder).admit(JoinRequest(secret, "a", ("10.0.0.2",)), "10.0.0.2")
    renewed = NodeAdmission(folder).renew("a", serial_of(joined.files["node.pem"].encode()))
    assert joined.files.keys() - renewed.files.keys() == {"ray.token"}


def test_answer_with_unexpected_files_is_refused(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue = cluster.server.admission._issue
    monkeypatch.setattr(
        cluster.server.admission, "_issue", lambda name, hosts: issue(name, hosts) | {"../escaped": "content"}
    )
    with pytest.raises(ConfigError, match="other files than expected"):
        cluster.join(tmp_path / "node")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "node").exists()


# The rules of admission, without a connection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ClusterFolder(tmp_path / "cluster").create("head", ["head.example", "10.0.0.1", "127.0.0.1", "localhost"])
    return tmp_path / "cluster"


def admit(folder: Path, name: str, hosts: list[str], peer: str, node: str = "") -> list[str]:
    """Join, and return the hosts of the server certificate."""
    secret = parse_token(JoinTokens(folder).create(node=node)).secret
    answer = NodeAdmission(folder).admit(JoinRequest(secret, name, tuple(hosts)), peer)
    return hosts_of(answer.files["server.pem"].encode())


def test_node_gets_the_hosts_it_asks_for(folder: Path) -> None:
    assert admit(folder, "a", ["A.example", "10.0.0.2", "a.example"], "10.0.0.2") == ["a.example", "10.0.0.2"]


@pytest.mark.parametrize("host", ["10.0.0.1", "HEAD.example", "127.0.0.1", "127.0.0.9", "::1", "localhost", "0.0.0.0"])
def test_node_of_another_machine_does_not_get_a_certificate_of_the_servers(folder: Path, host: str) -> None:
    with pytest.raises(Forbidden, match="is the server's machine"):
        admit(folder, "a", [host], "10.0.0.2")
    assert admit(folder, "a", [host], "127.0.0.1") == [host.lower()]  # several nodes on one machine


def test_node_does_not_get_the_name_or_the_hosts_of_another(folder: Path) -> None:
    admit(folder, "a", ["a.example", "10.0.0.2"], "10.0.0.2")
    with pytest.raises(Forbidden, match=r"a belongs to the node a at 10\.0\.0\.2"):
        admit(folder, "a", ["10.0.0.3"], "10.0.0.3")
    with pytest.raises(Forbidden, match=r"a\.example belongs to the node a"):
        admit(folder, "b", ["10.0.0.3", "A.EXAMPLE"], "10.0.0.3")
    admit(folder, "b", ["10.0.0.3"], "10.0.0.3")


def test_node_joins_again_from_its_address_or_with_a_token_that_names_it(folder: Path) -> None:
    admit(folder, "a", ["a.example"], "10.0.0.2")
    admit(folder, "a", ["a.example"], "10.0.0.2")
    assert admit(folder, "a", ["a.example"], "10.0.0.7", node="a") == ["a.example"]
    with pytest.raises(Forbidden, match="is for the node a"):
        admit(folder, "b", ["10.0.0.7"], "10.0.0.7", node="a")


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("", ["h"]),
        ("a/b", ["h"]),
        ("../a", ["h"]),
        ("x" * 64, ["h"]),
        ("a", []),
        ("a", ["h"] * 3 + [f"h{i}" for i in range(17)]),
        ("a", ["*.example"]),
        ("a", ["a b"]),
        ("a", [""]),
    ],
)
def test_invalid_names_and_hosts_are_refused_and_cost_no_token(folder: Path, name: str, hosts: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        admit(folder, name, hosts, "10.0.0.2")
    assert [each.used_at for each in JoinTokens(folder).records()] == [0.0]


def test_peer_address_is_compared_without_its_notation() -> None:
    assert peer_address("::ffff:10.0.0.2") == "10.0.0.2"
    assert peer_address("fe80::1%eth0") == peer_address("FE80:0::1") == "fe80::1"


def test_unreadable_membership_is_reported(tmp_path: Path) -> None:
    (tmp_path / join_module.MEMBERSHIP).write_bytes(msgspec.json.encode({"name": 1}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_membership(tmp_path)
