"""`syringa usage`: what was used and what it cost, as a table or as CSV."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from syringa.cli import moments
from syringa.cli.stored import plain, show, using
from syringa.errors import ConfigError
from syringa.store import ApiKey, Grouping, Store, UsageFilter, UsageSum

COUNTS = ("requests", "ok", "cancelled", "refused", "failed")
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
NUMBERS = (*COUNTS, *TOKENS, "cost")  # the columns of the CSV after the groups; programs read these names
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)


def run(
    flags: Mapping[str, Any],
    file: Path | None,
    *,
    by: str,
    since: str,
    until: str | None,
    organisation: str | None,
    key: str | None,
    model: str | None,
    as_csv: bool,
) -> None:
    groups = _groups(by)
    now = time.time()
    which = UsageFilter(
        since=None if since == "all" else moments.read(since, "--since", now, ahead=False),
        until=None if until is None else moments.read(until, "--until", now, ahead=False),
        organisation=organisation,
        key=key,
        model=model,
    )
    if which.since is not None and which.until is not None and which.since >= which.until:
        raise ConfigError(f"--until {until!r}: that is not after --since {since!r}")

    async def work(store: Store) -> tuple[list[UsageSum], list[ApiKey]]:
        return await store.usage.sums(groups, which), await store.keys.all() if "key" in groups else []

    sums, keys = using(flags, file, work)
    if as_csv:
        _write(groups, sums)
    else:
        _show(groups, sums, {each.id: each.name for each in keys})


def _groups(text: str) -> tuple[Grouping, ...]:
    names = list(dict.fromkeys(each.strip() for each in text.split(",")))
    groups = tuple(each for name in names for each in GROUPINGS if each == name)
    if len(groups) != len(names):
        raise ConfigError(f"--by {text!r}: expected {', '.join(GROUPINGS)}, or several with commas between them")
    return groups


def _write(groups: Sequence[Grouping], sums: Sequence[UsageSum]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow((*groups, *NUMBERS))
    for each in sums:
        numbers = (getattr(each, name) for name in (*COUNTS, *TOKENS))
        writer.writerow((*(_cell(each, name) for name in groups), *numbers, _money(each.cost)))


def _cell(sum: UsageSum, group: Grouping) -> str:
    text = plain(getattr(sum, group) or "")
    # A client chooses what it calls its user. A spreadsheet must not take that for a formula.
    return f"'{text}" if group == "user" and text.startswith(("=", "+", "-", "@")) else text


def _money(amount: float) -> str:
    """Without an exponent, and with all that a price of a millionth per token adds up to."""
    return f"{amount:.12f}".rstrip("0").rstrip(".")


def _show(groups: Sequence[Grouping], sums: Sequence[UsageSum], names: Mapping[str, str]) -> None:
    def row(each: UsageSum) -> tuple[str, ...]:
        numbers = (f"{getattr(each, name):,}" for name in (*COUNTS, *TOKENS))
        return (*(_label(each, group, names) for group in groups), *numbers, f"{each.cost:,.6f}")

    total = UsageSum(**{name: sum(getattr(each, name) for each in sums) for name in NUMBERS})
    titles = dict.fromkeys(groups, False) | {name.removesuffix("_tokens"): True for name in NUMBERS}
    blank = [""] * (len(groups) - 1)
    show(titles, [row(each) for each in sums], ("total", *blank, *row(total)[len(groups) :]))


def _label(sum: UsageSum, group: Grouping, names: Mapping[str, str]) -> str:
    text = getattr(sum, group) or "-"
    return f"{text} ({names[text]})" if group == "key" and names.get(text) else text
