"""The subcommands of whoever runs a shared server, and their options: keys, organisations and usage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from syringa.cli.options import settings_options, takes

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; without it, syringa.toml here if there is one."),
]
RequestLimit = Annotated[
    str | None, typer.Option("--requests-per-minute", metavar="N", help="Requests a minute; 0: no limit.")
]
TokenLimit = Annotated[
    str | None, typer.Option("--tokens-per-minute", metavar="N", help="Tokens a minute; 0: no limit.")
]
ConcurrentLimit = Annotated[
    str | None, typer.Option("--concurrent", metavar="N", help="Requests at the same time; 0: no limit.")
]

keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)
organisations = typer.Typer(
    help="Show organisations, and set how much each may ask for.", no_args_is_help=True, rich_markup_mode=None
)
_on_store = takes(*settings_options(("database",)))


@keys.command("create")
@_on_store
def create_key(
    organisation: Annotated[str, typer.Argument(help="Whose key it is; made if it is new.", show_default=False)],
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="What the key is for.", show_default=False)] = "",
    admin: Annotated[bool, typer.Option("--admin", help="It may also use the admin API.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="ID", help="A model it may use; all without. May be repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="WHEN", help="30d, 12h, or the UTC day on which it ends.")
    ] = None,
    requests_per_minute: RequestLimit = None,
    tokens_per_minute: TokenLimit = None,
    concurrent: ConcurrentLimit = None,
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """Make a key. It is printed once, alone, on standard output. Limits are its own, beside its organisation's."""
    from syringa.cli.keys import create

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    create(given, config, organisation, name=name, admin=admin, models=model, expires=expires, limits=limits)


@keys.command("list")
@_on_store
def list_keys(
    organisation: Annotated[str | None, typer.Argument(help="Only of this organisation.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Also keys that are revoked.")] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """List keys, with how they begin and when they were last used."""
    from syringa.cli.keys import show_all

    show_all(given, config, organisation, revoked=all, json=json)


@keys.command("revoke")
@_on_store
def revoke_key(
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `keys list` shows it.", show_default=False)],
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """Revoke a key. Every server that uses the database refuses it within a second."""
    from syringa.cli.keys import revoke

    revoke(given, config, id)


@organisations.command("list")
@_on_store
def list_organisations(config: ConfigFile = None, **given: Any) -> None:
    """List organisations and their limits."""
    from syringa.cli.organisations import show_all

    show_all(given, config)


@organisations.command("set")
@_on_store
def set_organisation(
    organisation: Annotated[str, typer.Argument(help="Made if it is new.", show_default=False)],
    requests_per_minute: RequestLimit = None,
    tokens_per_minute: TokenLimit = None,
    concurrent: ConcurrentLimit = None,
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """Set limits; `default` as a value goes back to the server's own."""
    from syringa.cli.organisations import change

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    change(given, config, organisation, limits)


@_on_store
def usage(
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="day, organisation, key, model, endpoint, user; or day,model.")
    ] = "day",
    since: Annotated[str, typer.Option("--since", metavar="WHEN", help="7d, 12h, a UTC day, or all.")] = "30d",
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help="Up to then; a day itself does not count.")
    ] = None,
    organisation: Annotated[str | None, typer.Option("--organisation", metavar="ID", help="Only of this one.")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="ID", help="Only of this key.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="ID", help="Only of this model.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="As CSV, without a total.")] = False,
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """Show requests, tokens and cost."""
    from syringa.cli.usage import run

    run(
        given,
        config,
        by=by,
        since=since,
        until=until,
        organisation=organisation,
        key=key,
        model=model,
        as_csv=csv,
    )
