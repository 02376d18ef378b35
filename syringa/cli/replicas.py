"""`syringa replicas`: the replicas of a running server."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from syringa.errors import ConfigError, EngineUnavailable, SyringaError

DEFAULT_URL = "http://127.0.0.1:8000"
_COLUMNS = ("id", "model", "status", "node", "fingerprint", "reason")

replicas = typer.Typer(
    help="List and drain the replicas of a running server.", no_args_is_help=True, rich_markup_mode=None
)

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The server.")]
Key = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="An admin key of the server.", envvar="SYRINGA_API_KEY")
]


@replicas.command("list")
def list_replicas(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the replicas of all models."""
    found = _call("GET", url, "/admin/replicas", api_key)["data"]
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        from syringa.cli.formatting import print_table

        print_table(dict.fromkeys(_COLUMNS, False), [[each[name] or "" for name in _COLUMNS] for each in found])


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
    _call(
        "POST", url, f"/admin/replicas/{quote(id, safe='')}/drain", api_key, {} if grace is None else {"grace": grace}
    )
    typer.echo(f"{id} is draining")


def _call(method: str, url: str, path: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
    """Send a request to the admin API and return the decoded response. Raises `SyringaError`."""
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.request(method, base + path, headers=headers, json=body, timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineUnavailable(f"{url}: {str(error) or type(error).__name__}") from None
    if answer.status_code != 200:
        raise _error(answer.status_code, answer.content)
    return answer.json()


def _error(status: int, body: bytes) -> SyringaError:
    message = f"the server answered {status}"
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        message += f": {msgspec.json.decode(body)['error']['message']}"
    return ConfigError(message)
