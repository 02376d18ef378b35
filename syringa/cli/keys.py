"""`syringa keys` and `syringa organizations`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syringa.cli.database import run_with_store
from syringa.cli.formatting import LIMITS, format_limit, format_time, parse_limit, parse_time, print_table
from syringa.errors import ConfigError, StartupError
from syringa.service.auth.keys import PREFIX, RateLimits, check_organization, create_api_key
from syringa.store import ApiKey, Organization, Store

_ORGANIZATION_COLUMNS = {"organization": False, **{name.replace("_", " "): True for name in LIMITS}, "created": False}
_KEY_COLUMNS = ("id", "organization", "name", "key", "may use", "limits", "created", "expires", "last used", "")


def create_key(
    flags: Mapping[str, Any],
    file: Path | None,
    organization: str,
    *,
    name: str,
    admin: bool,
    models: Sequence[str] | None,
    expires: str | None,
    limits: Mapping[str, str | None],
) -> None:
    """Create a key and print it on standard output."""
    now = time.time()
    expires_at = None if expires is None else int(parse_time(expires, "--expires", now, future=True))
    if expires_at is not None and expires_at <= now:
        raise ConfigError(f"--expires {expires!r}: expected a time in the future")
    rates = RateLimits(**{each: parse_limit(each, limits.get(each)) or 0 for each in LIMITS})
    key, stored = create_api_key(
        organization, name=name, admin=admin, models=models or None, rates=rates, expires_at=expires_at, now=now
    )
    created = run_with_store(
        flags, file, lambda store: store.write(lambda session: session.keys.create(stored)), create=True
    )
    if not created:
        raise StartupError(f"the key was not created: the id {stored.id} exists already; try again")
    until = "" if expires_at is None else f", valid until {format_time(expires_at)} UTC"
    print(
        f"Created {stored.id} for {organization}{until}. The key is shown only now: the database has its hash.",
        file=sys.stderr,
    )
    print(key)


def list_keys(
    flags: Mapping[str, Any], file: Path | None, organization: str | None, *, revoked: bool, json: bool
) -> None:
    if organization is not None:
        check_organization(organization)
    found = run_with_store(flags, file, lambda store: store.read(lambda session: session.keys.all(organization)))
    keys = [key for key in found if revoked or key.revoked_at is None]
    if json:
        print(msgspec.json.format(msgspec.json.encode([_public(key) for key in keys])).decode())
        return
    print_table(dict.fromkeys(_KEY_COLUMNS, False), [_key_row(key) for key in keys])


def revoke_key(flags: Mapping[str, Any], file: Path | None, id: str) -> None:
    if id.startswith(PREFIX):  # the key itself, which must not be printed
        raise ConfigError("expected the id of a key, which `syringa keys list` shows, not the key itself")

    async def work(store: Store) -> tuple[ApiKey | None, ApiKey | None]:
        before = await store.read(lambda session: session.keys.get(id))
        return before, await store.write(lambda session: session.keys.revoke(id))

    before, after = run_with_store(flags, file, work)
    if after is None:
        raise ConfigError(f"there is no key {id!r}; `syringa keys list` shows the ids")
    if before is not None and before.revoked_at is not None:
        print(f"{id} was already revoked on {format_time(before.revoked_at)} UTC", file=sys.stderr)
    else:
        print(f"Revoked {id} of {after.organization}; running servers refuse it within a second", file=sys.stderr)


def list_organizations(flags: Mapping[str, Any], file: Path | None) -> None:
    _print_organizations(
        run_with_store(flags, file, lambda store: store.read(lambda session: session.organizations.all()))
    )


def set_organization(flags: Mapping[str, Any], file: Path | None, id: str, limits: Mapping[str, str | None]) -> None:
    """Set the given limits; the others are left as they are."""
    check_organization(id)
    given = {name: text for name, text in limits.items() if text is not None}
    if not given:
        raise ConfigError("nothing to set: give --" + ", --".join(name.replace("_", "-") for name in LIMITS))
    values = {name: None if text == "default" else parse_limit(name, text) for name, text in given.items()}
    organization = run_with_store(
        flags,
        file,
        lambda store: store.write(lambda session: session.organizations.set_limits(id, values)),
        create=True,
    )
    _print_organizations([organization])


def _public(key: ApiKey) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(key).items() if name != "digest"}


def _key_row(key: ApiKey) -> tuple[str, ...]:
    limits = [
        f"{name.replace('_', ' ')} {format_limit(getattr(key, name), '')}" for name in LIMITS if getattr(key, name)
    ]
    models = "all models" if key.models is None else ", ".join(key.models) or "no model"
    now = time.time()
    if key.revoked_at is not None:
        state = f"revoked {format_time(key.revoked_at)}"
    else:
        state = "expired" if key.expires_at is not None and key.expires_at <= now else ""
    return (
        key.id,
        key.organization,
        key.name,
        f"{key.hint}…",
        f"{models}, admin" if key.admin else models,
        ", ".join(limits),
        format_time(key.created_at),
        format_time(key.expires_at) or "never",
        format_time(key.last_used_at) or "never",
        state,
    )


def _print_organizations(organizations: list[Organization]) -> None:
    rows = [
        (each.id, *(format_limit(getattr(each, name), "default") for name in LIMITS), format_time(each.created_at))
        for each in organizations
    ]
    print_table(_ORGANIZATION_COLUMNS, rows)
