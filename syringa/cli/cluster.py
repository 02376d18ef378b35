"""`syringa cluster`: the machines of a cluster, and the certificates with which they recognize each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syringa.cli.options import ConfigFile, settings_options, with_options

if TYPE_CHECKING:
    from syringa.cluster.authority import CertificateAuthority
    from syringa.cluster.folder import ClusterFolder

cluster = typer.Typer(help="Run models on several machines.", no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The folder of the certificates; default: cluster/ in the data folder."),
]

Pool = Annotated[
    str | None, typer.Option("--pool", metavar="NAME", help="The pool of this node: the same as --label pool=NAME.")
]
Label = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of this node. May be repeated.")
]
NodeName = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="The name of this node; default: that of the machine.")
]
Cpus = Annotated[
    int | None, typer.Option("--cpus", metavar="N", min=1, help="CPUs that this node offers; default: all.")
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=0, help="GPUs that this node offers; default: all.")
]


@cluster.command("init")
def init_cluster(
    dir: Folder = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A name or IP address under which this machine is reached, besides its own name and localhost. "
            "May be repeated.",
        ),
    ] = None,
) -> None:
    """Create a certificate authority, and certificates of this machine."""
    create_folder(cluster_folder(dir), host or [])


@cluster.command("renew")
def renew_certificates(dir: Folder = None) -> None:
    """Issue new certificates of this machine. Running servers use them for new connections."""
    from syringa.cluster.authority import expiry
    from syringa.cluster.join import read_membership, renew

    folder = cluster_folder(dir)
    if read_membership(folder.path) is not None:
        membership = renew(folder.path)
        ends = expiry(Path(folder.files("node").certificate).read_bytes())
        typer.echo(f"Renewed in {folder.path}: the certificates of the node {membership.name}, until {ends:%Y-%m-%d}.")
        return
    authority = folder.renew(socket.gethostname())
    typer.echo(f"Renewed in {folder.path}:")
    _print_certificates(folder, authority)


@cluster.command("start")
@with_options(*settings_options())
def start_cluster(
    config: ConfigFile = None,
    node: Annotated[
        bool, typer.Option("--node/--no-node", help="Run replicas on this machine too.", show_default=True)
    ] = True,
    name: NodeName = None,
    pool: Pool = None,
    label: Label = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    redis: Annotated[
        str,
        typer.Option(
            "--redis",
            metavar="HOST:PORT",
            help="Keep the state of Ray's head in this Redis, so that a head that is started again knows its nodes. "
            "Its password, if it has one, is read from the variable RAY_REDIS_PASSWORD.",
            envvar="RAY_REDIS_ADDRESS",
        ),
    ] = "",
    **options: Any,
) -> None:
    """Start the server of a cluster: Ray's head, a node on this machine, and `syringa serve`.

    Other machines join it with `syringa cluster join`. All options of `syringa serve` apply.
    """
    from syringa.ray.installed import check_installed

    check_installed()
    from syringa.cli.cluster_join import parse_labels
    from syringa.cli.cluster_start import MemberSettings, run
    from syringa.ray.redis import PASSWORD_VARIABLE

    labels = parse_labels(pool, label or [])
    settings = MemberSettings(name or socket.gethostname(), labels, cpus, gpus) if node else None
    password = os.environ.pop(PASSWORD_VARIABLE, "")  # for Ray's head only
    raise typer.Exit(run(options, config, node=settings, redis=redis, redis_password=password))


@cluster.command("token")
def create_token(
    dir: Folder = None,
    hours: Annotated[float, typer.Option("--hours", metavar="NUMBER", help="Time for which it is valid.")] = 1.0,
    node: Annotated[
        str,
        typer.Option("--node", metavar="NAME", help="Admit this node only, also if it has joined before."),
    ] = "",
    list_tokens: Annotated[bool, typer.Option("--list", help="List the tokens of the last day instead.")] = False,
) -> None:
    """Print a token with which one machine may join the cluster of this machine, once."""
    from syringa.cluster.join_tokens import JoinTokens

    tokens = JoinTokens(cluster_folder(dir).path)
    if not list_tokens:
        typer.echo(tokens.create(hours * 3600, node=node))
        return
    for token in tokens.records():
        expires = datetime.fromtimestamp(token.expires_at, UTC)
        use = f"by {token.used_by}" if token.used_by else f"for {token.node or 'any machine'}"
        typer.echo(f"{token.id}  {token.state(time.time()):<8}until {expires:%Y-%m-%d %H:%M} UTC  {use}")


@cluster.command("join")
def join_cluster(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="HOST or HOST:PORT of the cluster's server; default: the one joined."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help="A line of `syringa cluster token`, to join the first time.",
            envvar="SYRINGA_JOIN_TOKEN",
        ),
    ] = None,
    pool: Pool = None,
    label: Label = None,
    name: NodeName = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A further name or IP address under which the server reaches this machine. May be repeated.",
        ),
    ] = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="Time for requests to finish or move when it leaves."),
    ] = 30.0,
    dir: Folder = None,
) -> None:
    """Make this machine a node of a cluster, until it is stopped or drained."""
    from syringa.ray.installed import check_installed

    check_installed()
    from syringa.cli.cluster_join import become_member, member_options, parse_labels, run_node

    labels, folder = parse_labels(pool, label or []), cluster_folder(dir)
    membership = become_member(folder, address, token, name, host or [])
    raise typer.Exit(run_node(member_options(folder, membership, labels, cpus, gpus), grace, wait=not token))


@cluster.command("status")
def show_cluster(config: ConfigFile = None, dir: Folder = None) -> None:
    """List the nodes of the cluster of this machine."""
    from syringa.ray.installed import check_installed

    check_installed()
    from syringa.cli.cluster_join import head_address, print_status

    folder = cluster_folder(dir)
    print_status(folder, head_address(folder, config))


def create_folder(folder: ClusterFolder, hosts: Sequence[str]) -> None:
    """Create the authorities and the certificates of this machine, and print what there is."""
    from syringa.cluster.own_address import own_address

    name = socket.gethostname()
    authority = folder.create(name, [name, "localhost", "127.0.0.1", "::1", own_address(), *hosts])
    typer.echo(f"Created in {folder.path}:")
    typer.echo("  ca.pem  ca.key          the certificate authority; ca.key admits machines")
    typer.echo("  ray/  ray.token         an authority and a token for Ray, whose ports run code")
    _print_certificates(folder, authority)


def _print_certificates(folder: ClusterFolder, authority: CertificateAuthority) -> None:
    from syringa.cluster.authority import expiry, hosts_of

    server = Path(folder.files("server").certificate).read_bytes()
    typer.echo("  server.pem  server.key  for model workers on this machine, reached as " + ", ".join(hosts_of(server)))
    typer.echo("  client.pem  client.key  for API servers on this machine")
    typer.echo(
        f"The certificates expire on {expiry(server):%Y-%m-%d}, the authority on {authority.expires_at:%Y-%m-%d}."
    )
    typer.echo(f"SHA-256 fingerprint of the authority: {authority.fingerprint}")


def cluster_folder(path: Path | None) -> ClusterFolder:
    """Return the folder of the certificates; for None the one in the data folder."""
    from syringa.cluster.folder import ClusterFolder
    from syringa.store.url import data_folder

    return ClusterFolder((path or data_folder() / "cluster").expanduser().absolute())
