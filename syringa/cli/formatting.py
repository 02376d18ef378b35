"""Times, limits and tables on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from syringa.errors import ConfigError
from syringa.service.auth.keys import check_limit

LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")

_SPAN = re.compile(r"([0-9]{1,9})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MIN_TIME, _MAX_TIME = 0, 253402300799  # the years 1970 to 9999


def parse_time(text: str, option: str, now: float, *, future: bool) -> float:
    """Parse `30d`, `12h` or `2027-01-31` (UTC unless it names a zone) to seconds since 1970.

    A span counts from now, into the future or into the past. Raises `ConfigError`.
    """
    text = text.strip()
    if span := _SPAN.fullmatch(text):
        seconds = int(span[1]) * _SECONDS[span[2]]
        time = now + seconds if future else now - seconds
    else:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(f"{option} {text!r}: expected a span like 30d or 12h, or a day like 2027-01-31") from None
        time = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if not _MIN_TIME <= time <= _MAX_TIME:
        raise ConfigError(f"{option} {text!r}: expected a time in the years 1970 to 9999")
    return time


def format_time(time: float | None) -> str:
    return "" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def parse_limit(name: str, text: str | None) -> int | None:
    """Parse the limit that an option gives; None if it was not given."""
    if text is None:
        return None
    option = "--" + name.replace("_", "-")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{option} {text!r}: expected a whole number, 0 for no limit")
    limit = int(text[:20])
    check_limit(option, limit)
    return limit


def format_limit(limit: int | None, default: str) -> str:
    return default if limit is None else f"{limit:,}" if limit else "none"


def print_table(columns: Mapping[str, bool], rows: Iterable[Sequence[str]], total: Sequence[str] | None = None) -> None:
    """Print a table. `columns`: the titles, and whether each holds numbers; `total`: the last row."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, numeric in columns.items():
        table.add_column(title, no_wrap=True, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if total is not None:
        table.add_row(*(Text(printable(cell), style="bold") for cell in total))
    # As wide as necessary: an id that is broken into lines cannot be copied.
    Console(width=400).print(table, soft_wrap=True)


def printable(text: str) -> str:
    """Replace control characters, which a client may have sent and a terminal would obey."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "�" for each in text)
