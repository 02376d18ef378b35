"""Summarize benchmark runs (median and range over repeats) and render them as a table, Markdown or JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text


class LoadSample(msgspec.Struct, kw_only=True):
    """The measurements of one load with one number of streams. Times are seconds."""

    streams: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_median: float
    first_token_max: float
    between_tokens_median: float
    client_cpu_share: float  # of one core
    server_cpu_seconds: float | None = None
    other_cpu_share: float | None = None  # of one core, by processes that are neither the server nor the client
    prompt_tokens: tuple[int, int] | None = None  # minimum and maximum, by the server's usage


class ServerRun(msgspec.Struct, kw_only=True):
    """The measurements of one server in one round."""

    server: str
    version: str
    precision: str
    round: int
    samples: list[LoadSample] = []
    start_seconds: float | None = None  # from starting the process to its first token, of the first start
    starts: list[float] = []  # the same of every start
    long_first_token: list[float] = []
    cached_first_token: list[float] = []
    cached_tokens: int | None = None  # of the last prompt with a cached prefix
    memory_bytes: int | None = None  # PSS
    resident_bytes: int | None = None  # RSS
    filled_memory_bytes: int | None = None  # PSS, with the slots of 16 streams filled
    filled_tokens: int | None = None  # that filled them
    error: str | None = None


class Spread(msgspec.Struct, frozen=True):
    """Median and range of several measurements."""

    median: float
    low: float
    high: float
    count: int


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A table row: one metric, measured on each server."""

    key: str
    title: str
    unit: str
    values: dict[str, Spread]

    def ratio(self, server: str, peer: str) -> float | None:
        ours, theirs = self.values.get(server), self.values.get(peer)
        return ours.median / theirs.median if ours and theirs and theirs.median else None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a benchmark, servers in the order of their first run."""

    servers: list[str]
    precisions: dict[str, str]
    versions: dict[str, str]
    figures: list[Figure]
    failures: list[str]


def make_spread(values: Sequence[float]) -> Spread | None:
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


def summarize(runs: Sequence[ServerRun]) -> Summary:
    """Summarize all runs per server. A failed run counts with what it measured, and is listed under `failures`."""
    servers = list(dict.fromkeys(run.server for run in runs))
    counts = sorted({sample.streams for run in runs for sample in run.samples})

    def by_streams(streams: int, value: Callable[[LoadSample], float | None]) -> Callable[[ServerRun], list[float]]:
        def values(run: ServerRun) -> list[float]:
            found = [value(sample) for sample in run.samples if sample.streams == streams]
            return [each for each in found if each is not None]

        return values

    figures: list[Figure] = []

    def add(key: str, title: str, unit: str, values: Callable[[ServerRun], list[float]]) -> None:
        measured = {
            server: found
            for server in servers
            if (found := make_spread([value for run in runs if run.server == server for value in values(run)]))
        }
        if measured:
            figures.append(Figure(key=key, title=title, unit=unit, values=measured))

    for streams in counts:
        add(f"tokens_per_second_{streams}", _streams(streams), "tok/s", by_streams(streams, _tokens_per_second))
    for streams in counts:
        title = f"first token, {_streams(streams)}"
        add(f"first_token_{streams}", title, "ms", by_streams(streams, _first_token_ms))
    add("long_first_token", "first token, long prompt", "ms", lambda run: _ms(run.long_first_token))
    add("cached_first_token", "first token, prefix cached", "ms", lambda run: _ms(run.cached_first_token))
    add("start", "start to first token", "s", lambda run: _optional(run.start_seconds))
    add("memory", "memory (PSS) after 16 streams", "MiB", lambda run: _optional(run.memory_bytes, 1 / 2**20))
    for streams in counts:
        title = f"server CPU per token, {_streams(streams)}"
        add(f"server_cpu_{streams}", title, "ms", by_streams(streams, _server_cpu_ms))
    for streams in counts:
        title = f"client CPU, {_streams(streams)}"
        add(f"client_cpu_{streams}", title, "% of a core", by_streams(streams, _client_cpu_percent))
    return Summary(
        servers=servers,
        precisions={run.server: run.precision for run in runs},
        versions={run.server: run.version for run in runs},
        figures=figures,
        failures=[f"{run.server}, round {run.round}: {run.error}" for run in runs if run.error],
    )


def render_table(summary: Summary, title: str = "Syringa's benchmark") -> Table:
    """Render for the terminal, with ratios of the first server to each of the others."""
    header, *rows = _cells(summary)
    table = Table(title=title, caption=Text(_caption(summary)), title_justify="left", caption_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def render_markdown(summary: Summary, heading: str) -> str:
    header, *rows = _cells(summary)
    lines = [f"# {heading}", "", _markdown_row(header), _markdown_row(["---"] + ["---:"] * (len(header) - 1))]
    lines += [_markdown_row(row) for row in rows]
    return "\n".join([*lines, "", *_caption(summary).splitlines()]) + "\n"


def write_json(path: Path, runs: Sequence[ServerRun], **about: Any) -> None:
    """Write the summary and every single measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {**about, "summary": summarize(runs), "runs": list(runs)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _cells(summary: Summary) -> list[list[str]]:
    first, peers = (summary.servers or [""])[0], summary.servers[1:]
    rows = [["", *summary.servers, *(f"{first} ÷ {peer}" for peer in peers)]]
    for figure in summary.figures:
        measured = [spread_text(figure.values.get(server)) for server in summary.servers]
        # Client CPU only validates the measurement; a ratio would be meaningless.
        compared = [] if figure.key.startswith("client_cpu") else [figure.ratio(first, peer) for peer in peers]
        ratios = [f"{ratio:.2f} ×" if ratio is not None else "" for ratio in compared] or [""] * len(peers)
        rows.append([f"{figure.title} ({figure.unit})", *measured, *ratios])
    return rows


def _caption(summary: Summary) -> str:
    most = max((value.count for figure in summary.figures for value in figure.values.values()), default=0)
    lines = [f"Medians of up to {most} measurements, least to most in brackets."]
    for server in summary.servers:
        described = ", ".join(part for part in (summary.versions[server], summary.precisions[server]) if part)
        lines += [f"{server}: {described}."] if described else []
    return "\n\n".join(lines + [f"FAILED: {failure}" for failure in summary.failures])


def spread_text(value: Spread | None) -> str:
    """Format a median with the range of its measurements."""
    if value is None:
        return "—"
    if value.count == 1:
        return format_number(value.median)
    return f"{format_number(value.median)} ({format_number(value.low)}–{format_number(value.high)})"


def format_number(value: float) -> str:
    """Format with about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def _tokens_per_second(sample: LoadSample) -> float:
    return sample.tokens_per_second


def _first_token_ms(sample: LoadSample) -> float:
    return sample.first_token_median * 1000


def _server_cpu_ms(sample: LoadSample) -> float | None:
    return None if sample.server_cpu_seconds is None else sample.server_cpu_seconds * 1000 / sample.output_tokens


def _client_cpu_percent(sample: LoadSample) -> float:
    return sample.client_cpu_share * 100


def _ms(values: Sequence[float]) -> list[float]:
    return [value * 1000 for value in values]


def _optional(value: float | None, factor: float = 1.0) -> list[float]:
    return [] if value is None else [value * factor]
