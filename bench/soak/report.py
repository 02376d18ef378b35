"""The report of a soak: one table, what must be zero, and the files that keep it."""

from __future__ import annotations

import collections
import statistics
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.pages import replace_section
from bench.soak.results import Fault, Results
from bench.soak.usage_check import UsageCheck

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "development" / "soak.md"


class Row(msgspec.Struct):
    """A line of the table."""

    name: str
    value: str
    failed: bool = False  # it must be zero and is not


class Report(msgspec.Struct):
    name: str  # of the files and of the section in the page: sqlite, postgresql, fuzz
    about: str
    rows: list[Row]
    details: dict[str, Any] = {}

    @property
    def passed(self) -> bool:
        return not any(row.failed for row in self.rows)


def zero(name: str, count: int, note: str = "") -> Row:
    """Return a row whose count must be 0."""
    return Row(name, f"{count:,}{note}", failed=count > 0)


def soak_report(
    name: str,
    about: str,
    results: Results,
    usage: UsageCheck,
    *,
    leaked_blocks: int | None,
    memory: tuple[dict[str, int], dict[str, int]],
    unexpected: list[str],
) -> Report:
    causes = collections.Counter((results.cause(each), each.status, each.code) for each in results.failures)
    ours = [each for each in results.failures if results.cause(each) == "ours"]
    killed = [each for each in results.lost if results.is_killed(each)]
    lost = [each for each in results.lost if not results.is_killed(each)]
    refused = [each for each in results.refused if not results.is_explained(each)]
    total = sum(results.outcomes.values())
    rows = [Row("requests", f"{total:,} over {len(results.by_endpoint)} endpoints, fuzzed ones counted apart")]
    rows += [Row(f"- {outcome}", f"{count:,}") for outcome, count in results.outcomes.most_common()]
    rows += [
        Row(f"server errors because of a {cause}: {status} {code}", f"{count:,}")
        for (cause, status, code), count in sorted(causes.items())
        if cause != "ours"
    ]
    rows += [
        zero(
            "server errors that are ours",
            len(ours),
            _examples([f"{e.where} {e.status} {e.code} {e.request_id}" for e in ours]),
        ),
        zero("errors without the error envelope", len(results.unstructured), _examples(results.unstructured)),
        zero("requests that hang", len(results.hanging), _examples(results.hanging)),
        Row("slowest answers", ", ".join(f"{seconds:.1f} s ({where})" for seconds, where in results.slowest[:3])),
    ]
    rows += [_fault_row(kind, faults) for kind, faults in _by_kind(results.faults).items()]
    without = [each for each in lost if each.stream] + results.without_terminal
    rows += [
        Row("connections of killed API processes", f"{len(killed):,}"),
        zero(
            "other connections lost or refused",
            len(lost) + len(refused),
            _examples([f"{e.where} {e.request_id}" for e in lost]),
        ),
        zero(
            "streams without a terminal event",
            len(without),
            _examples([f"{each.where} {each.request_id}" for each in without]),
        ),
        Row("generating requests whose end was received", f"{usage.ended:,}, {usage.rows:,} usage rows"),
        zero("their usage rows lost", usage.lost, _examples(usage.examples)),
        zero("their usage rows duplicated", usage.duplicated),
        Row("KV blocks leaked", "unknown", failed=True)
        if leaked_blocks is None
        else zero("KV blocks leaked", leaked_blocks),
        zero("unexpected errors in the server's log", len(unexpected), _examples(unexpected)),
    ]
    before, after = memory
    rows += [
        Row(f"memory of {role}", f"{_mib(before.get(role))} at the start, {_mib(after.get(role))} at the end")
        for role in sorted(before.keys() | after.keys())
    ]
    details = {
        "by_endpoint": dict(sorted(results.by_endpoint.items())),
        "ours": ours[:50],
        "lost": lost[:50],
        "without_terminal": results.without_terminal[:50],
        "usage_examples": usage.examples,
        "faults": [
            {
                "kind": each.kind,
                "seconds": each.ended - each.began,
                "recovery_seconds": each.recovery_seconds,
                "note": each.note,
            }
            for each in results.faults
        ],
    }
    return Report(name, about, rows, details)


def _by_kind(faults: list[Fault]) -> dict[str, list[Fault]]:
    found: dict[str, list[Fault]] = {}
    for each in faults:
        found.setdefault(each.kind, []).append(each)
    return dict(sorted(found.items()))


def _fault_row(kind: str, faults: list[Fault]) -> Row:
    times = [each.recovery_seconds for each in faults if each.recovery_seconds is not None]
    notes = sorted({each.note for each in faults if each.note})
    failed = len(times) < len(faults) or any(not note.startswith("skipped") for note in notes)
    shown = f"{len(faults)} times"
    if times:
        shown += f", recovered in {statistics.median(times):.1f} s (at most {max(times):.1f} s)"
    return Row(kind, "; ".join([shown, *notes]), failed=failed)


def _examples(found: list[str]) -> str:
    return f": {'; '.join(found[:3])}" if found else ""


def _mib(value: int | None) -> str:
    return "none" if value is None else f"{value / 2**20:,.0f} MiB"


def show(report: Report, console: Console) -> None:
    table = Table("", "", title=report.about, show_header=False)
    for row in report.rows:
        table.add_row(row.name, f"[red]{escape(row.value)}[/]" if row.failed else escape(row.value))
    console.print(table)
    console.print("[green]passed[/]" if report.passed else "[red]failed[/]: see the red lines")


def write_json(report: Report) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"soak-{report.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return path


def write_page(report: Report, page: Path = PAGE) -> None:
    """Replace the report's table in the page, between its markers. Raises `ValueError` if they are missing."""
    lines = [report.about, "", "| | |", "| --- | --- |"]
    lines += [f"| {row.name.removeprefix('- ')} | {row.value.replace('|', ' ')} |" for row in report.rows]
    replace_section(page, report.name, lines)
