"""`syringa organisations`: who there is, and how much each may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syringa.cli import moments
from syringa.cli.stored import LIMITS, read_limit, show, show_limit, using
from syringa.errors import ConfigError
from syringa.service.auth.keys import check_organisation
from syringa.store import Organisation

_TITLES = {"organisation": False, **{name.replace("_", " "): True for name in LIMITS}, "made": False}


def show_all(flags: Mapping[str, Any], file: Path | None) -> None:
    _show(using(flags, file, lambda store: store.organisations.all()))


def change(flags: Mapping[str, Any], file: Path | None, id: str, limits: Mapping[str, str | None]) -> None:
    """A limit that was not given stays as it is."""
    check_organisation(id)
    given = {name: text for name, text in limits.items() if text is not None}
    if not given:
        raise ConfigError("nothing to set: give --" + ", --".join(name.replace("_", "-") for name in LIMITS))
    values = {name: None if text == "default" else read_limit(name, text) for name, text in given.items()}
    _show([using(flags, file, lambda store: store.organisations.set(id, **values), makes=True)])


def _show(organisations: list[Organisation]) -> None:
    rows = [
        (each.id, *(show_limit(getattr(each, name), "default") for name in LIMITS), moments.show(each.created_at))
        for each in organisations
    ]
    show(_TITLES, rows)
