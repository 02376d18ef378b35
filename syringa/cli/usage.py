"""`syringa usage`: requests, tokens and cost, as a table or as CSV."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from syringa.cli.database import run_with_store
from syringa.cli.formatting import parse_time, print_table, printable
from syringa.errors import ConfigError
from syringa.store import ApiKey, Grouping, Store, UsageFilter, UsageSum

COUNTS = ("requests", "ok", "cancelled", "refused", "failed")
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
NUMBERS = (*COUNTS, *TOKENS, "cost")  # the columns of the CSV after the groups: programs depend on these names
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)


def run(
    flags: Mapping[str, Any],
    file: Path | None,
    *,
    by: str,
    since: str,
    until: str | None,
    organization: str | None,
    key: str | None,
    model: str | None,
    as_csv: bool,
) -> None:
    groups = _groups(by)
    now = time.time()
    filter = UsageFilter(
        since=None if since == "all" else parse_time(since, "--since", now, future=False),
        until=None if until is None else parse_time(until, "--until", now, future=False),
        organization=organization,
        key=key,
        model=model,
    )
    if filter.since is not None and filter.until is not None and filter.since >= filter.until:
        raise ConfigError(f"--until {until!r}: expected a time after --since {since!r}")

    async def work(store: Store) -> tuple[list[UsageSum], list[ApiKey]]:
        return await store.read(
            lambda session: (session.usage.sums(groups, filter), session.keys.all() if "key" in groups else [])
        )

    sums, keys = run_with_store(flags, file, work)
    if as_csv:
        _write_csv(groups, sums)
    else:
        _print(groups, sums, {each.id: each.name for each in keys})


def _groups(text: str) -> tuple[Grouping, ...]:
    names = list(dict.fromkeys(each.strip() for each in text.split(",")))
    groups = tuple(each for name in names for each in GROUPINGS if each == name)
    if len(groups) != len(names):
        raise ConfigError(f"--by {text!r}: expected {', '.join(GROUPINGS)}, or several separated by commas")
    return groups


def _write_csv(groups: Sequence[Grouping], sums: Sequence[UsageSum]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow((*groups, *NUMBERS))
    for each in sums:
        numbers = (getattr(each, name) for name in (*COUNTS, *TOKENS))
        writer.writerow((*(_csv_cell(each, name) for name in groups), *numbers, _format_cost(each.cost)))


def _csv_cell(sum: UsageSum, group: Grouping) -> str:
    text = printable(getattr(sum, group) or "")
    # Clients choose the value of `user`; a spreadsheet must not evaluate it as a formula.
    return f"'{text}" if group == "user" and text.startswith(("=", "+", "-", "@")) else text


def _format_cost(amount: float) -> str:
    """Format a cost without an exponent, exact to the price of single tokens."""
    return f"{amount:.12f}".rstrip("0").rstrip(".")


def _print(groups: Sequence[Grouping], sums: Sequence[UsageSum], names: Mapping[str, str]) -> None:
    def row(each: UsageSum) -> tuple[str, ...]:
        numbers = (f"{getattr(each, name):,}" for name in (*COUNTS, *TOKENS))
        return (*(_label(each, group, names) for group in groups), *numbers, f"{each.cost:,.6f}")

    total = UsageSum(**{name: sum(getattr(each, name) for each in sums) for name in NUMBERS})
    titles = dict.fromkeys(groups, False) | {name.removesuffix("_tokens"): True for name in NUMBERS}
    blank = [""] * (len(groups) - 1)
    print_table(titles, [row(each) for each in sums], ("total", *blank, *row(total)[len(groups) :]))


def _label(sum: UsageSum, group: Grouping, names: Mapping[str, str]) -> str:
    text = getattr(sum, group) or "-"
    return f"{text} ({names[text]})" if group == "key" and names.get(text) else text
