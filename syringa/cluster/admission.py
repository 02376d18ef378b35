"""The admission of nodes to a cluster: which certificates a machine with a join token gets.

A node may not pose as another. Names and hosts belong to the node that has joined with them first, and to its address:
a node that joins from another address gets them only with a token that names it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from syringa.cluster.authority import KeyPair, hosts_of, serial_of
from syringa.cluster.folder import RAY_FOLDER, RAY_TOKEN, ClusterFolder, replace_file
from syringa.cluster.join_tokens import JoinTokens, TokenRecord
from syringa.errors import ConfigError, Forbidden, InvalidRequest

logger = logging.getLogger("syringa.cluster")

NODES = "nodes.json"
MAX_HOSTS = 16

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class JoinRequest(msgspec.Struct, frozen=True):
    secret: str
    name: str
    hosts: tuple[str, ...]  # under which API servers reach the node


class JoinAnswer(msgspec.Struct, frozen=True):
    """Files for the folder of the node, by their names there, and what it needs to know."""

    files: dict[str, str]
    ray_port: int = 0  # of Ray's head, on the host of the server; 0: without Ray


class NodeRecord(msgspec.Struct, frozen=True):
    """A node that has joined."""

    name: str
    hosts: tuple[str, ...]
    peer: str  # the address that it joined from
    joined_at: float
    serials: tuple[str, ...] = ()  # of its last certificate, and of the one with which it got that


class NodeAdmission:
    def __init__(self, folder: Path, *, ray_port: int = 0, clock: Callable[[], float] = time.time) -> None:
        """`folder`: that of the cluster, with the authority's key."""
        self._folder, self._ray_port, self._clock = folder, ray_port, clock
        self._tokens = JoinTokens(folder, clock)

    def admit(self, request: JoinRequest, peer: str) -> JoinAnswer:
        """Issue the certificates of a node that has a token. `peer`: the address of its connection.

        Raises `RequestError`, and `ConfigError` for a fault of the cluster's folder.
        """
        with self._tokens.redeem(request.secret, request.name) as token, _readable():
            nodes = self._nodes()
            hosts = self._check(request, peer, token, nodes)
            files = self._issue(request.name, hosts)
            if (self._folder / RAY_FOLDER).exists():
                files[RAY_TOKEN] = ClusterFolder(self._folder).ray_token.read_text()
            serials = (_node_serial(files),)
            nodes[request.name] = NodeRecord(request.name, hosts, peer, self._clock(), serials)
            self._store(nodes)
        logger.info("cluster: node joined: node=%s peer=%s hosts=%s", request.name, peer, ",".join(hosts))
        return JoinAnswer(files, self._ray_port)

    def renew(self, name: str, serial: str) -> JoinAnswer:
        """Issue the certificates of a node again, with the hosts that it has joined with. Raises `RequestError`.

        `serial`: of the certificate of its connection. It has to be the last one of this name, as a machine that has
        joined under it since has taken it over; or the one before, as the last answer may not have arrived.
        """
        with self._tokens.locked(), _readable():
            nodes = self._nodes()
            record = nodes.get(name)
            if record is None:
                raise Forbidden(f"the node {name} has not joined this cluster")
            if serial not in record.serials:
                raise Forbidden(f"the certificate of the node {name} was replaced by another: it has to join again")
            files = self._issue(name, record.hosts)
            nodes[name] = msgspec.structs.replace(record, serials=(_node_serial(files), serial))
            self._store(nodes)
            return JoinAnswer(files, self._ray_port)

    def _check(
        self, request: JoinRequest, peer: str, token: TokenRecord, nodes: dict[str, NodeRecord]
    ) -> tuple[str, ...]:
        """Return the hosts, without duplicates and as they are compared."""
        if not _NODE_NAME.fullmatch(request.name):
            raise InvalidRequest(
                f"the node name {request.name[:64]!r}: expected up to 63 letters, digits, '.', '_' and '-'"
            )
        if token.node and token.node != request.name:
            raise Forbidden(f"the join token is for the node {token.node}")
        hosts = tuple(dict.fromkeys(_normalize(host) for host in request.hosts))
        if not 0 < len(hosts) <= MAX_HOSTS:
            raise InvalidRequest(f"a node has 1 to {MAX_HOSTS} hosts, not {len(hosts)}")
        server = [_normalize(host) for host in hosts_of((self._folder / "server.pem").read_bytes())]
        on_server = _is_loopback(peer) or peer in server
        for host in hosts:
            if (_is_loopback(host) or host in server) and not on_server:
                raise Forbidden(f"the host {host} is the server's machine, and this node is at {peer}")
        for other in nodes.values():
            if other.peer == peer or other.name == token.node:
                continue
            if taken := {request.name} & {other.name} or set(hosts) & set(other.hosts):
                raise Forbidden(
                    f"{min(taken)} belongs to the node {other.name} at {other.peer}: choose another, or use a token of "
                    f"`syringa cluster token --node {other.name}` if this is the same machine"
                )
        return hosts

    def _issue(self, name: str, hosts: Sequence[str]) -> dict[str, str]:
        authority = ClusterFolder(self._folder).authority()
        try:
            server = authority.issue(name, roles={"server"}, hosts=hosts)
        except ConfigError as error:
            raise InvalidRequest(error.message) from None
        files = {"ca.pem": authority.pem().certificate.decode()}
        files |= _named("server", server) | _named("node", authority.issue(name, roles={"node"}))
        if (self._folder / RAY_FOLDER).exists():  # not in the folder of a version without Ray
            ray = ClusterFolder(self._folder / RAY_FOLDER).authority()
            files[f"{RAY_FOLDER}/ca.pem"] = ray.pem().certificate.decode()
            files |= _named(f"{RAY_FOLDER}/node", ray.issue(name, roles={"server", "client"}, hosts=hosts))
        return files

    def _store(self, nodes: dict[str, NodeRecord]) -> None:
        replace_file(self._folder / NODES, msgspec.json.encode(list(nodes.values())))

    def _nodes(self) -> dict[str, NodeRecord]:
        path = self._folder / NODES
        try:
            records = msgspec.json.decode(path.read_bytes(), type=list[NodeRecord]) if path.exists() else []
        except msgspec.DecodeError:
            raise ConfigError(f"{path}: cannot be read") from None
        return {each.name: each for each in records}


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def peer_address(text: str) -> str:
    """Return the address of a peer as it is compared: IPv4 addresses that were mapped to IPv6 are IPv4 again."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _normalize(host: str) -> str:
    try:
        return peer_address(host)
    except ValueError:
        return host.lower().rstrip(".")


def _is_loopback(host: str) -> bool:
    """Whether a host means the machine itself, wherever it is used."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost") or host.startswith("localhost.")


def _node_serial(files: dict[str, str]) -> str:
    return serial_of(files["node.pem"].encode())


def _named(name: str, pair: KeyPair) -> dict[str, str]:
    return {f"{name}.pem": pair.certificate.decode(), f"{name}.key": pair.key.decode()}
