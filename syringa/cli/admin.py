"""The commands of an administrator and their options: `keys`, `organizations` and `usage`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from syringa.cli.options import ConfigFile, settings_options, with_options

RequestLimit = Annotated[
    str | None, typer.Option("--requests-per-minute", metavar="N", help="Requests per minute; 0: no limit.")
]
TokenLimit = Annotated[
    str | None,
    typer.Option("--tokens-per-minute", metavar="N", help="Tokens per minute, input plus output; 0: no limit."),
]
ConcurrentLimit = Annotated[
    str | None, typer.Option("--concurrent", metavar="N", help="Requests at the same time; 0: no limit.")
]

keys = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)
organizations = typer.Typer(
    help="List organizations and set their rate limits.", no_args_is_help=True, rich_markup_mode=None
)
_with_database = with_options(*settings_options(("database",)))


@keys.command("create")
@_with_database
def create_key(
    organization: Annotated[
        str,
        typer.Argument(
            metavar="ORGANIZATION", help="The organization that the key belongs to; created if new.", show_default=False
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="TEXT", help="A note on what the key is for.", show_default=False)
    ] = "",
    admin: Annotated[bool, typer.Option("--admin", help="Allow the key to use the admin API.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="ID", help="Restrict the key to this model; default: all models. May be repeated."
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="WHEN", help="When it expires: 30d, 12h, or a day like 2027-01-31 (UTC)."),
    ] = None,
    requests_per_minute: RequestLimit = None,
    tokens_per_minute: TokenLimit = None,
    concurrent: ConcurrentLimit = None,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Create an API key and print it on standard output.

    It is shown only once. Its limits apply in addition to those of its organization.
    """
    from syringa.cli import keys

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    keys.create_key(options, config, organization, name=name, admin=admin, models=model, expires=expires, limits=limits)


@keys.command("list")
@_with_database
def list_keys(
    organization: Annotated[
        str | None,
        typer.Argument(metavar="ORGANIZATION", help="List only the keys of this organization.", show_default=False),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """List API keys with their first characters, limits and last use."""
    from syringa.cli import keys

    keys.list_keys(options, config, organization, revoked=all, json=json)


@keys.command("revoke")
@_with_database
def revoke_key(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="The id of the key, as `keys list` shows it.", show_default=False)
    ],
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Revoke an API key. Every server that uses the database refuses it within a second."""
    from syringa.cli import keys

    keys.revoke_key(options, config, id)


@organizations.command("list")
@_with_database
def list_organizations(config: ConfigFile = None, **options: Any) -> None:
    """List organizations and their rate limits."""
    from syringa.cli import keys

    keys.list_organizations(options, config)


@organizations.command("set")
@_with_database
def set_organization(
    organization: Annotated[
        str, typer.Argument(metavar="ORGANIZATION", help="The organization; created if new.", show_default=False)
    ],
    requests_per_minute: RequestLimit = None,
    tokens_per_minute: TokenLimit = None,
    concurrent: ConcurrentLimit = None,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Set the rate limits of an organization. The value `default` restores the server's default."""
    from syringa.cli import keys

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    keys.set_organization(options, config, organization, limits)


@_with_database
def usage(
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="GROUPS",
            help="Group by day, organization, key, model, endpoint or user, or by several: day,model.",
        ),
    ] = "day",
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="Start: 7d, 12h, a day like 2027-01-31 (UTC), or all.")
    ] = "30d",
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help="End, exclusive; same forms as --since.")
    ] = None,
    organization: Annotated[
        str | None, typer.Option("--organization", metavar="ID", help="Only this organization.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="ID", help="Only this key.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="ID", help="Only this model.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV without a total instead of a table.")] = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Show requests, tokens and cost."""
    from syringa.cli.usage import run

    run(
        options,
        config,
        by=by,
        since=since,
        until=until,
        organization=organization,
        key=key,
        model=model,
        as_csv=csv,
    )
