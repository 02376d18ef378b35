"""What the commands share that look into the store rather than run a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from syringa import config as settings
from syringa.errors import ConfigError, StartupError, StoreError
from syringa.service.auth.key_cache import is_absent
from syringa.service.auth.keys import check_limit
from syringa.store import Store
from syringa.store.url import hide_password

T = TypeVar("T")

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")


def using(
    flags: Mapping[str, Any], file: Path | None, work: Callable[[Store], Awaitable[T]], *, makes: bool = False
) -> T:
    """Runs `work` on the store that `syringa serve` would use. Only what `makes` something makes the database too: a
    mistyped path is told, and not taken for a store in which nothing is."""
    database = settings.load(flags, file=file).database
    logging.getLogger("syringa").addHandler(logging.NullHandler())  # what it would say of a failure is said below

    async def run() -> T:
        async with Store(database) as store:
            if not makes and is_absent(store):
                raise StartupError(f"{store.location.shown}: there is no database yet")
            try:
                return await work(store)
            except StoreError as error:
                raise StartupError(f"{store.location.shown}: {_reason(error)}") from None

    return asyncio.run(run())


def _reason(error: StoreError) -> str:
    cause = error.__cause__
    said = str(getattr(cause, "orig", None) or cause or error.message).strip() or error.message
    return hide_password(said.splitlines()[0])


def read_limit(name: str, text: str | None) -> int | None:
    """The number that an option gives; None: it was not given."""
    if text is None:
        return None
    option = "--" + name.replace("_", "-")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{option} {text!r}: expected a whole number, 0 for no limit")
    limit = int(text[:20])
    check_limit(option, limit)
    return limit


def show_limit(limit: int | None, otherwise: str) -> str:
    return otherwise if limit is None else f"{limit:,}" if limit else "none"


def show(columns: Mapping[str, bool], rows: Iterable[Sequence[str]], last: Sequence[str] | None = None) -> None:
    """A table. `columns`: its titles, and whether they hold numbers; `last`: a row that adds them up."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, numbers in columns.items():
        table.add_column(title, no_wrap=True, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    if last is not None:
        table.add_row(*(Text(plain(cell), style="bold") for cell in last))
    # As wide as it has to be: an id that is broken into lines cannot be copied.
    Console(width=400).print(table, soft_wrap=True)


def plain(text: str) -> str:
    """Without what a terminal would obey: some of it comes from clients."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "�" for each in text)
