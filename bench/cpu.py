"""Compare Syringa with llama.cpp's server and vLLM on this machine's CPU: `make bench`, or `python -m bench.cpu`.

One server runs at a time. Rounds are interleaved (every server once, then every server again), so that a machine that
becomes slower or faster affects all of them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bench.peers import SETUPS
from syringa.bench.chart import write_chart
from syringa.bench.processes import ServerSpec, cores, cpu_name
from syringa.bench.report import ServerRun, render_markdown, render_table, summarize, write_json
from syringa.bench.runner import BenchRunner, syringa_server
from syringa.bench.workload import Workload
from syringa.errors import StartupError

RESULTS = Path(__file__).resolve().parent / "results"
NAMES = ["syringa", *SETUPS]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(highlight=False)
    workload = Workload(streams=tuple(options.streams))
    rounds = options.rounds
    if options.quick:
        workload, rounds = workload.quick(), 1

    failed: list[ServerRun] = []
    servers: list[ServerSpec] = []
    for name in options.servers:
        try:
            servers.append(syringa_server() if name == "syringa" else SETUPS[name]())
        except StartupError as error:
            console.print(f"[red]{name}: {escape(error.message)}[/]")
            failed.append(ServerRun(server=name, version="", precision="", round=0, error=error.message))

    runs = list(failed)
    if (load := os.getloadavg()[0]) > 0.5:
        # Servers suffer differently: under load llama.cpp's CPU time per token grew fourfold, Syringa's hardly at all.
        console.print(f"[yellow]this machine is busy (load {load:.1f}): the ratios will not be fair[/]")
    try:
        for number in range(1, rounds + 1):
            for server in servers:
                console.print(f"[bold]round {number} of {rounds}: {server.name}[/]")
                runs.append(BenchRunner(workload, console.print).measure(server, number))
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: servers stopped, nothing written[/]")
        return 130
    _report(console, runs, workload, _order(options.servers, runs), full=not options.quick)
    return 1 if any(run.error for run in runs) else 0


def _report(console: Console, runs: list[ServerRun], workload: Workload, order: list[str], *, full: bool) -> None:
    runs = sorted(runs, key=lambda run: (run.round, order.index(run.server)))
    summary = summarize(runs)
    shape = f"{workload.prompt_tokens} prompt and {workload.output_tokens} output tokens"
    title = f"SmolLM2-135M on {cores()} cores"
    console.print(render_table(summary, title=f"{title}, {shape}"))
    if not full:
        console.print("A quick run only shows that everything works; its figures are not written.")
        return
    day = datetime.date.today().isoformat()
    rounds = max((run.round for run in runs), default=0)
    about = f"{day}, {cpu_name()}, {cores()} cores, {rounds} rounds, interleaved."
    write_json(RESULTS / f"cpu-{day}.json", runs, day=day, cpu=cpu_name(), cores=cores(), workload=workload)
    write_chart(RESULTS / f"cpu-{day}.svg", summary, f"{title}: tokens per second", f"{shape}, {about}")
    markdown = render_markdown(summary, f"{title}, {shape}")
    (RESULTS / "cpu.md").write_text(f"{markdown}\n{about}\n\n![chart](cpu-{day}.svg)\n", encoding="utf-8")
    console.print(f"written: {os.path.relpath(RESULTS)}/cpu-{day}.json, cpu-{day}.svg, cpu.md")


def _order(wanted: list[str], runs: list[ServerRun]) -> list[str]:
    """Return the measured servers in the requested order: ratios compare the first one with the others."""
    return [name for name in wanted if any(run.server == name for run in runs)]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--servers", type=_names, default=NAMES, help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--streams", type=_numbers, default=[1, 4, 16, 64], help="comma-separated (default: 1,4,16,64)")
    parser.add_argument("--rounds", type=_positive, default=3, help="runs of each server (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round with few requests, results not written")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown server {unknown[0]!r}, one of {', '.join(NAMES)}")
    return names


def _numbers(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
