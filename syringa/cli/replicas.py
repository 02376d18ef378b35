"""`syringa replicas`: the replicas of a running server."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from syringa.cli.admin_client import DEFAULT_URL, Json, Key, Url, call_admin_api, print_entries

_COLUMNS = ("id", "model", "status", "node", "fingerprint", "reason")

replicas = typer.Typer(
    help="List and drain the replicas of a running server.", no_args_is_help=True, rich_markup_mode=None
)


@replicas.command("list")
def list_replicas(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: Json = False,
) -> None:
    """List the replicas of all models."""
    print_entries(call_admin_api("GET", url, "/admin/replicas", api_key)["data"], _COLUMNS, json=json)


@replicas.command("drain")
def drain_replica(
    id: Annotated[str, typer.Argument(metavar="ID", help="The id, as `replicas list` shows it.", show_default=False)],
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="Seconds in which requests may finish before they move; default: the server's drain_timeout.",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Drain a replica: its requests finish or move to another one, and its process ends."""
    body = {} if grace is None else {"grace": grace}
    call_admin_api("POST", url, f"/admin/replicas/{quote(id, safe='')}/drain", api_key, body)
    typer.echo(f"{id} is draining")
