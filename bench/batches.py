"""Measure batches: `python -m bench.batches`.

What a running batch costs interactive requests: the time to first token of requests that come one after another, alone
and beside a batch, by turns. And how fast a batch is alone: its output tokens per second over HTTP, from its upload to
its last line, with the files, the store and the usage records, against the engine without a server on prompts of the
same length. Both are measured one right after the other, in alternating order, and the ratio is that of each pair.

    python -m bench.batches              four rounds
    python -m bench.batches --quick      one short round, nothing written
    python -m bench.batches --write      write the table to docs/performance.md as well
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from bench.pages import replace_section
from syringa.bench.load import LoadTarget, complete
from syringa.bench.processes import ServerSpec, cores, cpu_name, start
from syringa.bench.report import format_number
from syringa.bench.runner import syringa_server
from syringa.bench.workload import PromptGenerator
from syringa.errors import StartupError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = ROOT / "docs" / "performance.md"
ENDPOINT = "/v1/completions"
LINES, PROMPT_TOKENS, OUTPUT_TOKENS = 400, 100, 64  # of the batch whose speed is measured
REQUESTS, REQUEST_PROMPT, REQUEST_TOKENS = 48, 256, 4  # interactive ones, in each turn
MAX_PAUSE = 0.3  # seconds between two of them: random, so that they arrive at any point of a step
TURNS = 4  # alone and beside a batch, in each round
PAIRS = 2  # measurements of a batch's speed and the engine's, in each round
ROUNDS = 4
POLL_SECONDS = 0.5  # between two looks at a batch whose speed is measured: each takes time of the processors
MEDIAN_LIMIT, P95_LIMIT, SPEED_LIMIT = 1.3, 2.0, 0.95
OFFLINE = "--offline"


class BatchRound(msgspec.Struct, kw_only=True):
    """The measurements of one round."""

    alone: list[float]  # seconds to the first token
    beside: list[float]
    batch_lines_beside: int  # of the batch that were done meanwhile
    batch_speeds: list[float]  # output tokens per second
    offline_speeds: list[float]  # each measured right before or after the batch at the same place


class BatchBenchmark(msgspec.Struct, kw_only=True):
    about: str
    rounds: list[BatchRound]

    def first_tokens(self, name: str) -> list[float]:
        return [seconds for each in self.rounds for seconds in getattr(each, name)]

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.first_tokens("beside")) / statistics.median(self.first_tokens("alone"))

    @property
    def p95_ratio(self) -> float:
        return percentile(self.first_tokens("beside"), 0.95) / percentile(self.first_tokens("alone"), 0.95)

    @property
    def speed_ratios(self) -> list[float]:
        return [
            batch / offline
            for each in self.rounds
            for batch, offline in zip(each.batch_speeds, each.offline_speeds, strict=True)
        ]

    @property
    def speed_ratio(self) -> float:
        return statistics.median(self.speed_ratios)

    @property
    def passed(self) -> bool:
        return self.median_ratio <= MEDIAN_LIMIT and self.p95_ratio <= P95_LIMIT and self.speed_ratio >= SPEED_LIMIT


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def batch_lines(prompts: PromptGenerator, count: int) -> bytes:
    lines = []
    for number in range(count):
        body = {
            "prompt": prompts.text(PROMPT_TOKENS), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True
        }  # fmt: skip
        line = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}
        lines.append(json.dumps(line).encode())
    return b"\n".join(lines)


class Batches:
    """The batches of a server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)

    async def create(self, lines: bytes) -> str:
        upload = await self._http.post("/v1/files", files={"file": ("a.jsonl", lines)}, data={"purpose": "batch"})
        body = {"input_file_id": upload.json()["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        created = await self._http.post("/v1/batches", json=body)
        id: str = created.raise_for_status().json()["id"]
        return id

    async def get(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self._http.get(f"/v1/batches/{id}")).raise_for_status().json()
        return found

    async def wait(self, id: str, done: int, interval: float) -> dict[str, Any]:
        """Wait until so many lines are done. Ask for their number at this interval, and more often near the end."""
        while True:
            batch = await self.get(id)
            if batch["status"] in ("failed", "expired", "cancelled") or batch["request_counts"]["failed"]:
                raise StartupError(f"the batch failed: {batch}")
            if batch["request_counts"]["completed"] >= done and batch["request_counts"]["total"]:
                return batch
            left = done - batch["request_counts"]["completed"]
            await asyncio.sleep(interval if left > 0.1 * done else min(interval, 0.1))

    async def cancel(self, id: str) -> None:
        await self._http.post(f"/v1/batches/{id}/cancel")
        while True:
            if (await self.get(id))["status"] in ("cancelled", "completed"):
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._http.aclose()


async def measure_first_tokens(url: str, prompts: PromptGenerator, requests: int, seed: int) -> list[float]:
    target, pauses, times = LoadTarget(url), random.Random(seed), []
    for _ in range(requests):
        body = {"model": "default", "prompt": prompts.text(REQUEST_PROMPT), "max_tokens": REQUEST_TOKENS}
        completion = await complete(target, **body, temperature=0, ignore_eos=True)
        if completion.error:
            raise StartupError(f"a request failed: {completion.error}")
        times.append(completion.time_to_first_token)
        await asyncio.sleep(pauses.uniform(0, MAX_PAUSE))
    return times


async def measure_round(url: str, number: int, lines: int, requests: int, pairs: int) -> BatchRound:
    batches, prompts = Batches(url), PromptGenerator(f"batches {number}")
    try:
        await measure_first_tokens(url, prompts, 3, number)  # warms up
        alone: list[float] = []
        beside: list[float] = []
        done = 0
        for turn in range(TURNS):
            seed = TURNS * number + turn
            alone += await measure_first_tokens(url, prompts, requests // TURNS, seed)
            id = await batches.create(batch_lines(prompts, 2 * lines))
            before = (await batches.wait(id, 5, 0.05))["request_counts"]["completed"]
            beside += await measure_first_tokens(url, prompts, requests // TURNS, seed)
            batch = await batches.get(id)
            if batch["status"] != "in_progress":
                raise StartupError(f"the batch was not long enough: {batch}")
            done += batch["request_counts"]["completed"] - before
            await batches.cancel(id)
        speeds: list[float] = []
        offline: list[float] = []
        for pair in range(pairs):
            if pair % 2:
                offline.append(run_offline(pairs * number + pair, lines))
            speeds.append(await measure_batch(batches, prompts, lines))
            if not pair % 2:
                offline.append(run_offline(pairs * number + pair, lines))
    finally:
        await batches.close()
    return BatchRound(alone=alone, beside=beside, batch_lines_beside=done, batch_speeds=speeds, offline_speeds=offline)


async def measure_batch(batches: Batches, prompts: PromptGenerator, lines: int) -> float:
    """Return the output tokens per second of a batch, from its upload to its last line."""
    content = batch_lines(prompts, lines)
    started = time.perf_counter()
    batch = await batches.wait(await batches.create(content), lines, POLL_SECONDS)
    tokens: int = batch["usage"]["output_tokens"]
    return tokens / (time.perf_counter() - started)


def run_offline(number: int, lines: int) -> float:
    """Run such prompts in an engine of a process of its own, and return its output tokens per second."""
    command = [sys.executable, "-m", "bench.batches", OFFLINE, str(number), str(lines)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode:
        raise StartupError(f"the engine without a server failed: {result.stderr[-500:]}")
    return float(result.stdout.split()[-1])


def measure_offline(number: int, lines: int) -> float:
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.loading.loader import load_model
    from syringa.engine.scheduling.limits import SchedulerLimits
    from syringa.engine.worker.core import EngineCore
    from syringa.modelfiles import load_tokenizer, locate
    from syringa.types import EngineRequest, SamplingParams, StopConditions

    core = EngineCore(load_model(LoadOptions()), SchedulerLimits(max_queue=lines + 1))
    tokenizer, prompts = load_tokenizer(locate("default")), PromptGenerator(f"batches {number} offline")
    stopping = StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    sampling = SamplingParams(seed=0, temperature=0.0)

    def run(count: int) -> tuple[int, float]:
        started, tokens = time.perf_counter(), 0
        for index in range(count):
            prompt = tokenizer.encode(prompts.text(PROMPT_TOKENS)).ids
            core.submit(EngineRequest(id=str(index), prompt=prompt, sampling=sampling, stopping=stopping))
        while core.busy:
            tokens += sum(len(delta.tokens) for _, delta in core.step())
        return tokens, time.perf_counter() - started

    run(8)  # warms up
    tokens, seconds = run(lines)
    core.close()
    return tokens / seconds


def server_spec(folder: str) -> ServerSpec:
    plain = syringa_server()
    flags = ["--database", f"{folder}/syringa.db", "--requests-per-minute", "0"]
    return msgspec.structs.replace(plain, command=lambda port, streams: [*plain.command(port, streams), *flags])


COLUMNS = ("", "alone", "beside a batch", "ratio", "target", "met")


def table_rows(found: BatchBenchmark) -> list[tuple[str, ...]]:
    alone, beside = found.first_tokens("alone"), found.first_tokens("beside")

    def shown(name: str, first: float, second: float, ratio: str, target: str, met: bool) -> tuple[str, ...]:
        return name, format_number(first), format_number(second), ratio, target, "yes" if met else "no"

    def first_token(name: str, values: tuple[float, float], ratio: float, limit: float) -> tuple[str, ...]:
        return shown(f"first token, {name}, ms", *values, f"{ratio:.2f} ×", f"≤ {limit:g} ×", ratio <= limit)

    medians = 1000 * statistics.median(alone), 1000 * statistics.median(beside)
    tails = 1000 * percentile(alone, 0.95), 1000 * percentile(beside, 0.95)
    offline = statistics.median(speed for each in found.rounds for speed in each.offline_speeds)
    batch = statistics.median(speed for each in found.rounds for speed in each.batch_speeds)
    ratios, ratio = found.speed_ratios, found.speed_ratio
    spread = f"{ratio:.2f} × ({min(ratios):.2f}–{max(ratios):.2f})"
    met = ratio >= SPEED_LIMIT
    return [
        first_token("median", medians, found.median_ratio, MEDIAN_LIMIT),
        first_token("p95", tails, found.p95_ratio, P95_LIMIT),
        shown("tok/s: engine without a server, batch alone", offline, batch, spread, f"≥ {SPEED_LIMIT:g} ×", met),
    ]


def write_results(found: BatchBenchmark, *, page: bool) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "batches.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    if not page:
        return
    rows = (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 2), "---"), *table_rows(found))
    table = ["| " + " | ".join(row).strip() + " |" for row in rows]
    requests = len(found.first_tokens("beside"))
    done = sum(each.batch_lines_beside for each in found.rounds)
    beside = f"While these {requests} requests ran beside it, the batch completed {done} lines."
    replace_section(PAGE, "batches", [found.about, "", *table, "", beside])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    parser.add_argument(OFFLINE, nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.offline:
        print(measure_offline(*options.offline))
        return 0
    console = Console(highlight=False)
    if (load := os.getloadavg()[0]) > 0.5:
        console.print(f"[yellow]this machine is busy (load {load:.1f}): the measured times are not comparable[/]")
    lines, requests, pairs = (60, 8, 1) if options.quick else (LINES, REQUESTS, PAIRS)
    rounds = 1 if options.quick else options.rounds
    hardware = f"{cpu_name()}, {cores()} cores"
    about = f"{datetime.date.today().isoformat()}, {hardware}, {rounds} rounds."
    found = BatchBenchmark(about=about, rounds=[])
    try:
        for number in range(rounds):
            with tempfile.TemporaryDirectory() as folder, start(server_spec(folder), 1) as running:
                found.rounds.append(asyncio.run(measure_round(running.url, number, lines, requests, pairs)))
            console.print(f"round {number + 1}: {found.rounds[-1]}")
    except StartupError as error:
        console.print(f"[red]{error.message}[/]")
        return 1
    table = Table(*COLUMNS, title="Batches")
    for row in table_rows(found):
        table.add_row(*row)
    console.print(table)
    if not options.quick:
        write_results(found, page=options.write)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
