"""`syringa cluster`: the certificates with which the machines of a cluster recognize each other."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from syringa.cluster.authority import CertificateAuthority
    from syringa.cluster.folder import ClusterFolder

cluster = typer.Typer(
    help="Create and renew the certificates of a cluster.", no_args_is_help=True, rich_markup_mode=None
)

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The folder of the certificates; default: cluster/ in the data folder."),
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
    folder = cluster_folder(dir)
    name = socket.gethostname()
    authority = folder.create(name, [name, "localhost", "127.0.0.1", "::1", *(host or [])])
    typer.echo(f"Created in {folder.path}:")
    typer.echo("  ca.pem  ca.key          the certificate authority; ca.key admits machines")
    _print_certificates(folder, authority)


@cluster.command("renew")
def renew_certificates(dir: Folder = None) -> None:
    """Issue new certificates of this machine. Running servers use them for new connections."""
    folder = cluster_folder(dir)
    authority = folder.renew(socket.gethostname())
    typer.echo(f"Renewed in {folder.path}:")
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
