"""Measure a small organization's time to first token beside a large one on the same server: `python -m bench.fairness`.

The small organization sends 20 requests, one after another: first alone, then while the large one keeps 40 in flight.
Its median time to first token must stay within twice the time alone plus two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from syringa.bench.load import CompletionResult, LoadTarget, complete, first_model
from syringa.bench.processes import ServerSpec, cores, cpu_name, start
from syringa.bench.report import format_number
from syringa.bench.runner import syringa_server
from syringa.bench.workload import PromptGenerator
from syringa.errors import StartupError

RESULTS = Path(__file__).resolve().parent / "results"
# Without rate limits, which would throttle the large organization and leave the server idle.
EXTRA_FLAGS = ["--requests-per-minute", "0"]
SMALL, LARGE = "small-organization", "large-organization"  # API keys: each belongs to an organization of its own
REQUESTS, STREAMS = 20, 40
TOKENS = 64  # output tokens of the large organization's requests
SMALL_TOKENS = 4  # of the small one's: only its first token is measured
MAX_PAUSE = 0.3  # seconds between the small one's requests: random, so that they arrive at any point of a step
VARIANTS = {  # prompt tokens of the small and of the large organization
    "100 beside 100": (100, 100),
    "1,000 beside 1,000": (1000, 1000),
    "100 beside 1,000": (100, 1000),
}


class FairnessResult(msgspec.Struct, kw_only=True):
    """The measurements of one variant, in seconds."""

    variant: str
    alone: list[float]  # times to first token
    beside: list[float]
    step: float  # mean step time under load
    large_requests: int  # finished while the small organization was measured
    large_tokens_per_second: float

    @property
    def allowed(self) -> float:
        return 2 * statistics.median(self.alone) + 2 * self.step

    @property
    def passed(self) -> bool:
        return statistics.median(self.beside) <= self.allowed


class BackgroundLoad:
    """The large organization: `STREAMS` streams, each of which sends its next request when the last has finished."""

    def __init__(self, url: str, model: str, prompts: PromptGenerator, length: int) -> None:
        self.finished: list[tuple[float, CompletionResult]] = []  # with the time of its end
        self._target = LoadTarget(url, LARGE)
        self._model, self._prompts, self._length = model, prompts, length
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> BackgroundLoad:
        """Start the streams and wait until half as many requests have finished: by then they are out of phase."""
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        while len(self.finished) < STREAMS // 2:
            await asyncio.sleep(0.05)
            self.check()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise the error of a stream that has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self) -> None:
        while True:
            body = _body(self._model, self._prompts.text(self._length), TOKENS)
            completion = await complete(self._target, **body)
            if completion.error:
                raise StartupError(f"a request of the large organization failed: {completion.error}")
            self.finished.append((time.perf_counter(), completion))


def _body(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def _measure_small_organization(
    url: str, model: str, prompts: PromptGenerator, length: int, requests: int
) -> list[float]:
    """Return the times to first token."""
    target, pauses, times = LoadTarget(url, SMALL), random.Random(0), []
    for _ in range(requests):
        completion = await complete(target, **_body(model, prompts.text(length), SMALL_TOKENS))
        if completion.error:
            raise StartupError(f"a request of the small organization failed: {completion.error}")
        times.append(completion.time_to_first_token)
        await asyncio.sleep(pauses.uniform(0, MAX_PAUSE))
    return times


async def measure(url: str, model: str, variant: str, requests: int) -> FairnessResult:
    own, other = VARIANTS[variant]
    prompts = PromptGenerator(f"fairness {variant}")
    await _measure_small_organization(url, model, prompts, own, 3)  # warms up
    alone = await _measure_small_organization(url, model, prompts, own, requests)
    async with BackgroundLoad(url, model, prompts, other) as background:
        started = time.perf_counter()
        beside = await _measure_small_organization(url, model, prompts, own, requests)
        seconds = time.perf_counter() - started
        background.check()
        finished = [completion for ended, completion in background.finished if ended > started]
    if not finished:
        raise StartupError("no request of the large organization finished during the measurement")
    # A stream gets one token per step, so the mean time between tokens is the mean step time.
    gaps = [(each.token_times[-1] - each.token_times[0]) / (each.output_tokens - 1) for each in finished]
    return FairnessResult(
        variant=variant,
        alone=alone,
        beside=beside,
        step=statistics.fmean(gaps),
        large_requests=len(finished),
        large_tokens_per_second=sum(each.output_tokens for each in finished) / seconds,
    )


def server_spec() -> ServerSpec:
    plain = syringa_server()
    flags = ["--api-key", SMALL, "--api-key", LARGE, *EXTRA_FLAGS]
    return msgspec.structs.replace(plain, command=lambda port, streams: [*plain.command(port, streams), *flags])


COLUMNS = (
    "prompt tokens",
    "alone, ms",
    "beside 40, ms",
    "max, ms",
    "step, ms",
    "allowed, ms",
    "large, tok/s",
    "passed",
)


def table_rows(results: list[FairnessResult]) -> list[tuple[str, ...]]:
    found = []
    for each in results:
        figures = [
            statistics.median(each.alone), statistics.median(each.beside), max(each.beside), each.step, each.allowed,
        ]  # fmt: skip
        shown = [format_number(1000 * figure) for figure in figures]
        found.append(
            (each.variant, *shown, format_number(each.large_tokens_per_second), "yes" if each.passed else "NO")
        )
    return found


def write_results(results: list[FairnessResult], about: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"about": about, "requests": REQUESTS, "streams": STREAMS, "results": results}
    (RESULTS / "fairness.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    lines = ["# A small organization beside a large one", ""]
    lines += [
        "| " + " | ".join(row) + " |"
        for row in (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *table_rows(results))
    ]
    lines += [
        "",
        f"The small organization's median time to first token over {REQUESTS} requests, one after another: alone, and "
        f"while the large one has {STREAMS} requests in flight all the time, of {TOKENS} tokens each. Allowed is twice "
        "the time alone plus two steps.",
        "",
        about,
    ]
    (RESULTS / "fairness.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first variant with 5 requests, results not written")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if (load := os.getloadavg()[0]) > 0.5:
        console.print(f"[yellow]this machine is busy (load {load:.1f}): the measured times are not comparable[/]")
    results = []
    try:
        with start(server_spec(), STREAMS) as running:
            model = first_model(running.url, api_key=SMALL)
            for variant in list(VARIANTS)[: 1 if options.quick else None]:
                console.print(f"{variant} …")
                measurement = measure(running.url, model, variant, 5 if options.quick else REQUESTS)
                results.append(asyncio.run(measurement))
                console.print(
                    "  "
                    + ", ".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, table_rows(results)[-1], strict=True))
                )
    except StartupError as error:
        console.print(f"[red]{error.message}[/]", markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: server stopped, nothing written[/]")
        return 130
    table = Table(*COLUMNS, title="Time to first token of a small organization beside a large one")
    for row in table_rows(results):
        table.add_row(*row)
    console.print(table)
    if not options.quick:
        hardware = f"{cpu_name()}, {cores()} cores, load {load:.1f} before the run"
        write_results(results, f"{datetime.date.today().isoformat()}, SmolLM2-135M, {hardware}.")
        console.print(f"written: {os.path.relpath(RESULTS)}/fairness.json, fairness.md")
    return 0 if all(each.passed for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
