"""`syringa cluster start`, `join` and `status` without Ray: what is refused before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from syringa.cli import main
from syringa.cli.cluster_join import become_member, head_address, member_options, parse_labels
from syringa.cli.cluster_start import server_address
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join import MEMBERSHIP, Membership
from syringa.cluster.own_address import own_address
from syringa.config import Config
from syringa.errors import ConfigError
from tests.ray.harness import free_port


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    """The folder of a server's machine."""
    made = ClusterFolder(tmp_path / "cluster")
    made.create("head", ["localhost", "127.0.0.1", own_address()])
    return made


@pytest.fixture
def member(folder: ClusterFolder) -> ClusterFolder:
    """The folder of a node."""
    (folder.path / MEMBERSHIP).write_bytes(msgspec.json.encode(Membership("n1", "127.0.0.1:8470", 6379)))
    return folder


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the line with which a command fails."""
    with pytest.raises(SystemExit) as exit_:
        main(["cluster", *arguments])
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_labels_of_a_node() -> None:
    assert parse_labels("idle", ["zone=a", "kind=h100"]) == {"zone": "a", "kind": "h100", "pool": "idle"}
    assert parse_labels(None, ["pool=x"]) == {"pool": "x"}
    assert parse_labels("x", ["pool=x"]) == {"pool": "x"}
    assert parse_labels(None, []) == {}


@pytest.mark.parametrize(
    ("pool", "label", "message"),
    [
        (None, "zone", "--label 'zone': expected KEY=VALUE"),
        (None, "=a", "expected KEY=VALUE"),
        (None, "zone=", "expected KEY=VALUE"),
        (None, "zone=a,b=c", "expected KEY=VALUE"),
        (None, "zone=-a", "letter or digit"),
        ("a b", "zone=a", "--pool 'a b'"),
        ("x", "pool=y", "--pool x contradicts --label pool=y"),
    ],
)
def test_labels_that_ray_would_not_accept_are_refused(pool: str | None, label: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_labels(pool, [label])
    assert message in raised.value.message


def test_join_without_a_token_needs_an_earlier_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, "join", "127.0.0.1", "--dir", str(tmp_path / "none"))
    assert error == "syringa: this machine has not joined yet: add --token with a line of `syringa cluster token`\n"


def test_join_does_not_use_a_token_twice(member: ClusterFolder, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, "join", "127.0.0.1", "--token", "x", "--dir", str(member.path))
    assert "this machine has joined 127.0.0.1:8470 as n1 already: leave out --token" in error


def test_a_member_starts_its_node_again_without_a_token(member: ClusterFolder) -> None:
    membership = become_member(member, "127.0.0.1", None, None, [])
    assert membership == Membership("n1", "127.0.0.1:8470", 6379)
    with pytest.raises(ConfigError, match="not other"):
        become_member(member, "other", None, None, [])
    options = member_options(member, membership, {"pool": "x"}, 2, None)
    assert (options.head, options.name, options.cpus) == ("127.0.0.1:6379", "n1", 2)
    assert options.address == own_address()  # Ray does not use the loopback address


def test_a_server_without_ray_cannot_be_joined_as_a_node(member: ClusterFolder) -> None:
    (member.path / MEMBERSHIP).write_bytes(msgspec.json.encode(Membership("n1", "127.0.0.1:8470", 0)))
    with pytest.raises(ConfigError, match="has no Ray"):
        become_member(member, None, None, None, [])


def test_the_head_is_that_of_the_node_or_of_this_machine(
    member: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert head_address(member, None) == "127.0.0.1:6379"
    (member.path / MEMBERSHIP).unlink()
    monkeypatch.setenv("SYRINGA_RAY_PORT", "7000")
    assert head_address(member, None) == f"{own_address()}:7000"
    monkeypatch.setenv("SYRINGA_CLUSTER_ADDRESS", "10.0.0.7:1")
    assert head_address(member, None) == "10.0.0.7:7000"


def test_status_says_that_the_head_cannot_be_reached(
    folder: ClusterFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("", 0))  # not listening
        monkeypatch.setenv("SYRINGA_RAY_PORT", str(closed.getsockname()[1]))
        monkeypatch.setattr("syringa.cli.cluster_join.environment", lambda _: {})  # that of the tests stays as it is
        error = fails(capsys, "status", "--dir", str(folder.path))
    assert "Ray's head at" in error
    assert "cannot be reached: Connection refused" in error


def test_a_node_without_the_token_of_ray_is_refused(member: ClusterFolder, capsys: pytest.CaptureFixture[str]) -> None:
    member.ray_token.unlink()
    assert "ray.token: No such file" in fails(capsys, "join", "--dir", str(member.path))


def test_start_refuses_an_address_that_the_certificate_does_not_have(
    folder: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(capsys, "start", "--cluster-dir", str(folder.path), "--cluster-address", "10.9.8.7:8470")
    assert "and not for 10.9.8.7: choose another --cluster-address" in error
    assert "`syringa cluster init --host 10.9.8.7`" in error


def test_start_refuses_a_port_of_ray_that_is_taken(folder: ClusterFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        error = fails(capsys, "start", "--cluster-dir", str(folder.path), "--ray-port", str(port))
    assert f"ray_port {port}: Address already in use" in error


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost", "--redis 'localhost': expected HOST:PORT"),
        ("127.0.0.1:PORT", "--redis 127.0.0.1:PORT: cannot be reached: Connection refused"),
    ],
)
def test_start_refuses_a_redis_that_cannot_be_reached(
    folder: ClusterFolder, capsys: pytest.CaptureFixture[str], address: str, message: str
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        port = str(closed.getsockname()[1])
        arguments = ("--cluster-dir", str(folder.path), "--ray-port", str(free_port()))
        error = fails(capsys, "start", *arguments, "--redis", address.replace("PORT", port))
    assert error == f"syringa: {message.replace(':PORT:', f':{port}:')}\n"


def test_nodes_join_at_the_address_of_this_machine_by_default(folder: ClusterFolder) -> None:
    assert str(server_address(Config(), folder)) == f"{own_address()}:8470"
    assert str(server_address(Config(cluster_address="localhost:1"), folder)) == "localhost:1"
