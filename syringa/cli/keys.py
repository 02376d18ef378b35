"""`syringa keys`: make, list and revoke the keys of organisations."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syringa.cli import moments
from syringa.cli.stored import LIMITS, read_limit, show, show_limit, using
from syringa.errors import ConfigError, StartupError
from syringa.service.auth.caller import Rates
from syringa.service.auth.keys import PREFIX, check_organisation, mint
from syringa.store import ApiKey, Store


def create(
    flags: Mapping[str, Any],
    file: Path | None,
    organisation: str,
    *,
    name: str,
    admin: bool,
    models: Sequence[str] | None,
    expires: str | None,
    limits: Mapping[str, str | None],
) -> None:
    now = time.time()
    expires_at = None if expires is None else int(moments.read(expires, "--expires", now, ahead=True))
    if expires_at is not None and expires_at <= now:
        raise ConfigError(f"--expires {expires!r}: that is over already")
    rates = Rates(**{each: read_limit(each, limits.get(each)) or 0 for each in LIMITS})
    key, kept = mint(
        organisation, name=name, admin=admin, models=models or None, rates=rates, expires_at=expires_at, now=now
    )
    if not using(flags, file, lambda store: store.keys.create(kept), makes=True):
        raise StartupError("the key could not be kept: its id is taken")
    until = "" if expires_at is None else f", until {moments.show(expires_at)} UTC"
    print(
        f"{kept.id} for {organisation}{until}. The key is shown this once; what is stored is its hash.", file=sys.stderr
    )
    print(key)


def show_all(
    flags: Mapping[str, Any], file: Path | None, organisation: str | None, *, revoked: bool, json: bool
) -> None:
    if organisation is not None:
        check_organisation(organisation)
    found = using(flags, file, lambda store: store.keys.all(organisation))
    keys = [key for key in found if revoked or key.revoked_at is None]
    if json:
        print(msgspec.json.format(msgspec.json.encode([_public(key) for key in keys])).decode())
        return
    titles = ("id", "organisation", "name", "key", "may use", "limits", "made", "expires", "last use", "")
    show(dict.fromkeys(titles, False), [_cells(key) for key in keys])


def revoke(flags: Mapping[str, Any], file: Path | None, id: str) -> None:
    if id.startswith(PREFIX):  # which must not be repeated
        raise ConfigError("a key is revoked by its id, which `syringa keys list` shows, and not by itself")

    async def work(store: Store) -> tuple[ApiKey | None, ApiKey | None]:
        return await store.keys.get(id), await store.keys.revoke(id)

    before, after = using(flags, file, work)
    if after is None:
        raise ConfigError(f"there is no key {id!r}; `syringa keys list` shows their ids")
    if before is not None and before.revoked_at is not None:
        print(f"{id} was revoked already, on {moments.show(before.revoked_at)} UTC", file=sys.stderr)
    else:
        print(f"{id} of {after.organisation} is revoked; servers refuse it within a second", file=sys.stderr)


def _public(key: ApiKey) -> dict[str, Any]:
    """The hash is no secret, and nobody's business either."""
    return {name: value for name, value in msgspec.structs.asdict(key).items() if name != "digest"}


def _cells(key: ApiKey) -> tuple[str, ...]:
    limits = [f"{name.replace('_', ' ')} {show_limit(getattr(key, name), '')}" for name in LIMITS if getattr(key, name)]
    models = "all models" if key.models is None else ", ".join(key.models) or "no model"
    now = time.time()
    if key.revoked_at is not None:
        state = f"revoked {moments.show(key.revoked_at)}"
    else:
        state = "expired" if key.expires_at is not None and key.expires_at <= now else ""
    return (
        key.id,
        key.organisation,
        key.name,
        f"{key.hint}…",
        f"{models}, admin" if key.admin else models,
        ", ".join(limits),
        moments.show(key.created_at),
        moments.show(key.expires_at) or "never",
        moments.show(key.last_used_at) or "never",
        state,
    )
