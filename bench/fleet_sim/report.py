"""The tables of a simulation: for the terminal, and for docs/development/fleet-scale.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.fleet_sim.results import MAX_MINUTES, MAX_TICK, MIN_SHARE, SimulationResult
from bench.pages import replace_section

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "development" / "fleet-scale.md"


def summary_rows(result: SimulationResult) -> list[tuple[str, str, str]]:
    """Return lines of the first table: what, figure, target."""
    rejected = sum(result.rejected.values())
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(result.rejected.items()))
    median, high, largest = (1000 * each for each in result.tick)
    peak_median, peak_high = (1000 * each for each in result.peak_tick)
    route, slow_route = (1e6 * each for each in result.route)
    return [
        ("requests", f"{result.requests:,}", ""),
        ("lost", f"{result.lost:,}", "0"),
        ("503 after `queue_timeout`", f"{rejected:,}" + (f": {why}" if why else ""), "0 for another reason"),
        ("GPU-seconds on requests ÷ min(offered, demanded)", f"{result.share:.3f}", f"≥ {MIN_SHARE}"),
        (
            "CPU time of a reconcile, ms",
            f"median {median:.1f}, p99 {high:.1f}, max {largest:.1f}; peak: {peak_median:.1f}, {peak_high:.1f}",
            f"p99 ≤ {1000 * MAX_TICK:.0f}",
        ),
        ("CPU time of the router for a request of the peak, µs", f"median {route:.0f}, p99 {slow_route:.0f}", ""),
        (
            "the run, minutes",
            f"{result.wall_minutes:.1f}, of which {result.cpu_minutes:.1f} of CPU time",
            f"≤ {MAX_MINUTES:.0f}",
        ),
        ("moves of requests", _counts(result.moves), ""),
        ("pause of a moved stream, s (median, p99)", _pairs(result.pauses), ""),
        ("until all requests of a replica generate again, s", _pairs(result.recoveries), ""),
        ("faults", _counts(result.faults), ""),
        ("evictions of replicas", _counts(result.evictions), ""),
        ("replicas started, at most at a time", f"{result.starts:,}, {result.most_replicas:,}", ""),
        ("from start to ready, s (median, p99)", "{:.0f}, {:.0f}".format(*result.load_seconds), ""),
        (
            "weights fetched",
            f"{result.fetched_terabytes:.1f} TB, at most {result.most_fetches} nodes at a time; the server's network "
            f"was the limit for {result.link_minutes:.0f} minutes",
            "",
        ),
    ]


PHASE_COLUMNS = ("", "day", "ramp", "peak")


def phase_rows(result: SimulationResult) -> list[tuple[str, ...]]:
    """Return lines of the second table: what, and a figure for each phase."""
    lines = {
        "hours": lambda each: f"{each.hours:g}",
        "requests answered": lambda each: f"{each.completed:,}",
        "503": lambda each: f"{each.rejected:,}",
        "in the queue, s (median, p99)": lambda each: "{:.2f}, {:.1f}".format(*each.queue),
        "to the first token, s (median, p99)": lambda each: "{:.2f}, {:.1f}".format(*each.first_token),
        "cached share of cacheable prompt tokens": lambda each: f"{each.cached_share:.2f}",
        "turns of chats that found their replica": lambda each: f"{each.turns_found:.2f}",
        "GPUs offered": lambda each: f"{each.offered:,.0f}",
        "GPUs demanded": lambda each: f"{each.demanded:,.1f}",
        "GPUs spent on requests": lambda each: f"{each.spent:,.1f}",
        "GPUs spent on prompts again": lambda each: f"{each.repeated:,.1f}",
        "GPUs of replicas with requests": lambda each: f"{each.busy:,.1f}",
        "GPUs of all replicas": lambda each: f"{each.held:,.1f}",
        "spent ÷ min(offered, demanded)": lambda each: f"{each.share:.3f}",
        "minutes below 0.9": lambda each: f"{each.minutes_below} of {each.minutes:,}",
    }
    return [(name, *(show(each) for each in result.phases)) for name, show in lines.items()]


def show(result: SimulationResult, console: Console) -> None:
    table = Table("", "figure", "target", title=f"{result.nodes:,} nodes, seed {result.seed}")
    for row in summary_rows(result):
        table.add_row(*row)
    console.print(table)
    table = Table(*PHASE_COLUMNS)
    for each in phase_rows(result):
        table.add_row(*each)
    console.print(table)


def write(result: SimulationResult, about: str) -> str:
    """Write the page and the file with all figures. Return the name of the latter."""
    lines = [_line(("", "figure", "target")), "| --- | --- | --- |", *map(_line, summary_rows(result)), ""]
    lines += [_line(PHASE_COLUMNS), "| --- | ---: | ---: | ---: |", *map(_line, phase_rows(result)), "", about]
    replace_section(PAGE, "results", lines)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "fleet-scale.json"
    document = {"about": about, "result": result}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return file.name


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def _pairs(times: Mapping[str, tuple[float, float]]) -> str:
    return "; ".join(f"{reason}: {middle:.1f}, {high:.1f}" for reason, (middle, high) in times.items())
