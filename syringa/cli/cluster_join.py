"""`syringa cluster join` and `status`: this machine as a node of a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import typer

from syringa import logs
from syringa.cli.formatting import print_table
from syringa.cli.options import load_config
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join import Membership, ServerAddress, join, parse_server_address, read_membership
from syringa.cluster.own_address import own_address
from syringa.errors import ConfigError, StartupError
from syringa.ray import internals
from syringa.ray.installed import check_installed
from syringa.ray.member import ClusterMember, MemberOptions
from syringa.ray.processes import HEAD_LABEL, MEMBER_LABEL, environment

logger = logging.getLogger("syringa.cluster")

POLL_SECONDS = 0.2

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # what Ray accepts in labels


def become_member(
    folder: ClusterFolder, address: str | None, token: str | None, name: str | None, hosts: Sequence[str]
) -> Membership:
    """Return the membership of this machine; with a token, join first. Raises `ConfigError`."""
    membership = read_membership(folder.path)
    if token:
        if membership is not None:
            raise ConfigError(
                f"{folder.path}: this machine has joined {membership.server} as {membership.name} already: leave out "
                "--token to start its node, or choose another --dir"
            )
        if not address:
            raise ConfigError("the address of the cluster's server is missing")
        return join(address, token, folder.path, name=name or socket.gethostname(), hosts=[own_address(), *hosts])
    if membership is None:
        raise ConfigError("this machine has not joined yet: add --token with a line of `syringa cluster token`")
    if address and str(parse_server_address(address)) != membership.server:
        raise ConfigError(f"{folder.path}: this machine has joined {membership.server}, not {address}")
    if not membership.ray_port:
        raise ConfigError(f"{membership.server} has no Ray: it was not started with `syringa cluster start`")
    return membership


def run_node(options: MemberOptions, grace: float, *, wait: bool = False) -> int:
    """Run a node until it is drained or a signal arrives, at which it is drained. Return the exit status.

    `wait`: for a head that cannot be reached yet.
    """
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    logs.configure("info")
    os.environ.update(environment(options.folder))  # before Ray is imported
    member = ClusterMember(options)
    try:
        node = member.start(lambda: bool(signals), wait=wait)
        if node is None:
            typer.echo("Stopped before the cluster was joined.")
            return 0
        shown = ", ".join(f"{key}={value}" for key, value in options.labels.items()) or "no labels"
        typer.echo(f"Joined {options.head} as {options.name} ({node.address}, {shown}). Leave with Ctrl-C.")
        while not signals:
            if member.poll() == "left":
                typer.echo("This node was drained, and has left the cluster.")
                return 0
            time.sleep(POLL_SECONDS)
        typer.echo(f"Leaving: requests have {grace:g} s to finish or move. A second signal ends this at once.")
        signals.clear()
        member.drain(grace, lambda: bool(signals))
        typer.echo("Left the cluster.")
        return 0
    finally:
        member.stop()


def member_options(
    folder: ClusterFolder,
    membership: Membership,
    labels: dict[str, str],
    cpus: int | None,
    gpus: int | None,
) -> MemberOptions:
    check_installed()
    folder.check_ray()
    server = parse_server_address(membership.server)
    address = own_address(server.host, server.port)
    if ip_address(address).is_loopback:  # Ray does not use addresses that only this machine can reach
        address = own_address()
    return MemberOptions(
        head=str(ServerAddress(server.host, membership.ray_port)),
        folder=folder,
        name=membership.name,
        address=address,
        labels=labels,
        cpus=cpus,
        gpus=gpus,
    )


def parse_labels(pool: str | None, labels: Sequence[str]) -> dict[str, str]:
    """Return the labels of a node. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for each in labels:
        key, separator, value = each.partition("=")
        if not separator or not _NAME.fullmatch(key) or not _NAME.fullmatch(value):
            raise ConfigError(
                f"--label {each!r}: expected KEY=VALUE, each of up to 63 letters, digits, '.', '_' and '-', with a "
                "letter or digit at both ends"
            )
        found[key] = value
    if pool:
        if not _NAME.fullmatch(pool):
            raise ConfigError(f"--pool {pool!r}: expected letters, digits, '.', '_' and '-'")
        if found.get("pool", pool) != pool:
            raise ConfigError(f"--pool {pool} contradicts --label pool={found['pool']}")
        found["pool"] = pool
    return found


def head_address(folder: ClusterFolder, file: Path | None) -> str:
    """Return where Ray's head is, on a node or on the machine of the server."""
    membership = read_membership(folder.path)
    if membership is not None:
        return str(ServerAddress(parse_server_address(membership.server).host, membership.ray_port))
    with contextlib.suppress(OSError):
        return folder.ray_address.read_text()
    config = load_config({}, file)
    host = parse_server_address(config.cluster_address).host if config.cluster_address else own_address()
    return str(ServerAddress(host, config.ray_port))


def print_status(folder: ClusterFolder, head: str) -> None:
    """Print the nodes of the cluster, as Ray lists them. Raises `StartupError` if its head cannot be reached."""
    check_installed()
    folder.check_ray()
    os.environ.update(environment(folder))  # before Ray is imported
    try:
        internals.check_head(head, folder.ray_files())
        nodes = internals.HeadClient(head).nodes()
    except internals.HeadUnavailable as error:
        raise StartupError(str(error)) from None
    members = [node for node in nodes if HEAD_LABEL not in node.labels]
    alive = [node for node in members if node.alive]
    typer.echo(f"Ray's head at {head} responds. Nodes: {len(alive)}")
    rows = []
    for node in sorted(alive, key=lambda each: each.name):
        labels = ",".join(f"{k}={v}" for k, v in sorted(node.labels.items()) if k != MEMBER_LABEL)
        cpus, gpus = (str(int(node.resources.get(kind, 0))) for kind in ("CPU", "GPU"))
        memory = f"{node.resources.get('memory', 0.0) / 2**30:.1f} GiB"
        rows.append([node.name, node.address, cpus, gpus, memory, labels])
    if rows:
        print_table(dict.fromkeys(("name", "address", "cpus", "gpus", "memory", "labels"), False), rows)
