"""`syringa nodes` and `syringa pools`: the machines of a running server, and the pools to which they belong."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from syringa.cli.admin_client import DEFAULT_URL, Json, Key, Url, call_admin_api, print_entries

_NODE_COLUMNS = ("name", "state", "pool", "offered", "gpus", "cpus", "replicas", "reason")
_POOL_COLUMNS = ("name", "state", "mode", "override", "nodes", "offered", "gpus", "cpus", "replicas", "until", "reason")

nodes = typer.Typer(help="List and drain the nodes of a running server.", no_args_is_help=True, rich_markup_mode=None)
pools = typer.Typer(
    help="List, open and close the pools of a running server.", no_args_is_help=True, rich_markup_mode=None
)

Pool = Annotated[str, typer.Argument(metavar="NAME", help="The name of the pool.", show_default=False)]


@nodes.command("list")
def list_nodes(url: Url = DEFAULT_URL, api_key: Key = None, json: Json = False) -> None:
    """List the nodes."""
    found = sorted(call_admin_api("GET", url, "/admin/nodes", api_key)["data"], key=lambda each: str(each["name"]))
    if not json:
        found = [each | {"offered": "yes" if each["offered"] else "no"} for each in found]
    print_entries(found, _NODE_COLUMNS, json=json)


@nodes.command("drain")
def drain_node(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name, as `nodes list` shows it.", show_default=False)
    ],
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="Seconds in which requests may finish before they move; default: the grace period of its pool.",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Drain a node: its replicas end, and their requests finish or move to other nodes."""
    body = {} if grace is None else {"grace": grace}
    call_admin_api("POST", url, f"/admin/nodes/{quote(name, safe='')}/drain", api_key, body)
    typer.echo(f"{name} is draining")


@pools.command("list")
def list_pools(url: Url = DEFAULT_URL, api_key: Key = None, json: Json = False) -> None:
    """List the pools. `gpus` and `cpus` are those in use, and all."""
    found = call_admin_api("GET", url, "/admin/pools", api_key)["data"]
    print_entries(found if json else [_row(each) for each in found], _POOL_COLUMNS, json=json)


@pools.command("open")
def open_pool(name: Pool, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Open a pool, whatever its schedule says."""
    _set_pool(name, "open", url, api_key)
    typer.echo(f"{name} is open")


@pools.command("close")
def close_pool(name: Pool, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Close a pool, whatever its schedule says: its replicas are drained."""
    _set_pool(name, "close", url, api_key)
    typer.echo(f"{name} is closing")


@pools.command("reset")
def reset_pool(name: Pool, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Let a pool that was opened or closed follow its schedule again."""
    _set_pool(name, "reset", url, api_key)
    typer.echo(f"{name} follows its schedule")


def _set_pool(name: str, action: str, url: str, api_key: str | None) -> None:
    call_admin_api("POST", url, f"/admin/pools/{quote(name, safe='')}/{action}", api_key)


def _row(pool: dict[str, Any]) -> dict[str, Any]:
    used = {unit: f"{pool[f'{unit}_used']}/{pool[unit]}" for unit in ("gpus", "cpus")}
    until = ""
    if pool["changes_at"] is not None:
        until = datetime.fromtimestamp(pool["changes_at"]).strftime("%Y-%m-%d %H:%M")
    return pool | used | {"until": until}
