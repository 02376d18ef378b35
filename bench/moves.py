"""Measure how long a stream pauses when its replica is taken away: `python -m bench.moves`.

A server with two replicas runs one stream with 500 tokens of prompt, and does nothing else. The replica that computes
it is drained, killed or stopped (SIGSTOP); the pause is the time from the last token before to the first after. The
three ways are interleaved.

    python -m bench.moves              12 of each
    python -m bench.moves --write      write the table to docs/performance.md as well
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from bench.pages import replace_section
from syringa.bench.processes import RunningServer, cores, cpu_name, process_tree, start
from syringa.bench.report import Spread, make_spread, spread_text
from syringa.bench.runner import syringa_server
from syringa.bench.workload import PromptGenerator

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
WORKER = "syringa.engine.worker.server"
PAIRS = 12  # an announced move and one of each unannounced kind
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 120
TAKEN_AT = 30  # tokens after which the replica is taken away
LIMITS = {"drained": 1.0, "killed": 3.5, "stopped": 3.5}  # seconds, of the median pause


class ReplicaServer:
    """A running server with two replicas."""

    def __init__(self, running: RunningServer) -> None:
        self.url, self._pid = running.url, running.pid

    def workers(self) -> list[int]:
        found = []
        for pid in process_tree(self._pid):
            with contextlib.suppress(OSError):
                if WORKER in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def replicas(self) -> list[dict[str, str]]:
        listed = httpx.get(self.url + "/admin/replicas", timeout=60).raise_for_status().json()["data"]
        return [each for each in listed if each["status"] == "ready"]

    def wait_ready(self) -> None:
        while len(self.replicas()) < 2 or len(self.workers()) != 2:
            time.sleep(0.1)
        time.sleep(0.5)  # let the processes settle

    def token_times(self, prompt: str) -> Iterator[float]:
        """Yield when each token of a stream arrives."""
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=120) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    assert "error" not in (chunk := json.loads(line[6:])), chunk
                    yield time.perf_counter()


def busiest(pids: list[int]) -> int:
    """Return the process that has used the most CPU time within a moment: the one that computes the stream."""
    before = {pid: _ticks(pid) for pid in pids}
    time.sleep(0.1)
    return max(pids, key=lambda pid: _ticks(pid) - before[pid])


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def measure(server: ReplicaServer, way: str, prompt: str) -> float:
    """Return the pause of one stream whose replica is taken away, in seconds."""
    server.wait_ready()
    times: list[float] = []
    fault = threading.Thread(target=_WAYS[way], args=(server,))
    for at in server.token_times(prompt):
        times.append(at)
        if len(times) == TAKEN_AT:
            fault.start()
    fault.join()
    assert len(times) >= OUTPUT_TOKENS - 1, f"{len(times)} tokens"
    return max(after - before for before, after in itertools.pairwise(times[TAKEN_AT - 1 :]))


def _drain(server: ReplicaServer) -> None:
    pids = server.workers()
    computing = busiest(pids)
    # Replicas are started in the order of their ids, processes in the order of theirs.
    position = sorted(pids).index(computing)
    replica = sorted(server.replicas(), key=lambda each: int(each["id"].rpartition("-")[2]))[position]
    httpx.post(f"{server.url}/admin/replicas/{replica['id']}/drain", json={"grace": 0}, timeout=60).raise_for_status()


def _kill(server: ReplicaServer) -> None:
    os.kill(busiest(server.workers()), signal.SIGKILL)


def _stop(server: ReplicaServer) -> None:
    os.kill(busiest(server.workers()), signal.SIGSTOP)


_WAYS: dict[str, Callable[[ReplicaServer], None]] = {"drained": _drain, "killed": _kill, "stopped": _stop}


def measure_pairs(pairs: int, report: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the pauses in seconds, by what happened to the replica."""
    prompts = PromptGenerator(17)
    pauses: dict[str, list[float]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--replicas", "2", "--heartbeat-timeout", "3", "--requests-per-minute", "0"]
        spec = syringa_server()
        command = spec.command
        spec = msgspec.structs.replace(
            spec,
            command=lambda port, streams: [*command(port, streams), *extra, "--database", f"{folder}/syringa.db"],
        )
        with start(spec, 1) as running:
            server = ReplicaServer(running)
            for pair in range(1, pairs + 1):
                for way, found in pauses.items():
                    found.append(measure(server, way, prompts.text(PROMPT_TOKENS)))
                    report(f"pair {pair:2}  {way:8} {found[-1]:.2f} s")
    return pauses


def summarize_pauses(pauses: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    return {way: spread for way, found in pauses.items() if (spread := make_spread(found)) is not None}


def meets_limit(way: str, pause: Spread) -> bool:
    return pause.median <= LIMITS[way]


def table_rows(spreads: Mapping[str, Spread]) -> list[list[str]]:
    return [
        [way, spread_text(pause), f"≤ {LIMITS[way]:g}", "yes" if meets_limit(way, pause) else "no"]
        for way, pause in spreads.items()
    ]


def write_page(about: str, spreads: Mapping[str, Spread], page: Path = PAGE) -> None:
    """Replace the table in the page, between its markers. Raises `ValueError` if they are missing."""
    lines = [about, "", "| the replica is | pause, s | target | met |", "| --- | ---: | ---: | --- |"]
    replace_section(page, "moves", [*lines, *("| " + " | ".join(row) + " |" for row in table_rows(spreads))])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.moves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"of each kind (default: {PAIRS})")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md as well")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if (load := os.getloadavg()[0]) > 0.5:
        console.print(f"[yellow]this machine is busy (load {load:.1f}): the pauses will be longer[/]")
    pauses = measure_pairs(options.pairs, console.print)
    spreads = summarize_pauses(pauses)
    about = f"{datetime.date.today()}, {cpu_name()}, {cores()} cores, {options.pairs} interleaved pairs."
    table = Table("the replica is", "pause, s", "target", "met", title=about, title_justify="left")
    for row in table_rows(spreads):
        table.add_row(*row)
    console.print(table)
    passed = all(meets_limit(way, pause) for way, pause in spreads.items())
    if options.pairs >= PAIRS:
        document = {"about": about, "pairs": options.pairs, "passed": passed, "seconds": pauses}
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / "moves.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        console.print(f"written: {os.path.relpath(path)}")
    if options.write:
        write_page(about, spreads)
        console.print(f"written: {os.path.relpath(PAGE)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
