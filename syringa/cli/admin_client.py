"""The admin API of a running server, as used by subcommands."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from syringa.errors import ConfigError, EngineUnavailable, SyringaError

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The server.")]
Key = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="An admin key of the server.", envvar="SYRINGA_API_KEY")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_entries(entries: Sequence[dict[str, Any]], columns: Sequence[str], *, json: bool) -> None:
    """Print some fields of the entries of a list as a table, or all of them as JSON."""
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(entries)).decode())
        return
    from syringa.cli.formatting import print_table

    rows = [["" if each[name] is None else str(each[name]) for name in columns] for each in entries]
    print_table(dict.fromkeys(columns, False), rows)


def call_admin_api(method: str, url: str, path: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
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
