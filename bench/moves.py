"""Measure how long a stream pauses when its replica is taken away: `python -m bench.moves`.

A server with two replicas runs one stream with 500 tokens of prompt, and does nothing else. The replica that computes
it is drained, killed or stopped (SIGSTOP); the pause is the time from the last token before to the first after.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from syringa.bench.processes import RunningServer, cores, cpu_name, process_tree, start
from syringa.bench.runner import syringa_server
from syringa.bench.workload import PromptGenerator

WORKER = "syringa.engine.worker.server"
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 120
TAKEN_AT = 30  # tokens after which the replica is taken away
LIMITS = {"drain": 1.0, "kill": 3.5, "stop": 3.5}  # seconds, of the median pause


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


_WAYS: dict[str, Callable[[ReplicaServer], None]] = {"drain": _drain, "kill": _kill, "stop": _stop}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.moves", description=__doc__)
    parser.add_argument("--runs", type=int, default=12, help="of each kind, interleaved")
    options = parser.parse_args()
    console = Console()
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
            for _ in range(options.runs):
                for way, found in pauses.items():
                    found.append(measure(server, way, prompts.text(PROMPT_TOKENS)))
                    console.print(f"{way}: {found[-1]:.2f} s", highlight=False)
    table = Table("replica is", "median s", "largest s", "limit", title=f"{cpu_name()}, {cores()} cores")
    for way, found in pauses.items():
        table.add_row(way, f"{statistics.median(found):.2f}", f"{max(found):.2f}", f"{LIMITS[way]:.1f}")
    console.print(table)
    return int(any(statistics.median(found) > LIMITS[way] for way, found in pauses.items()))


if __name__ == "__main__":
    sys.exit(main())
