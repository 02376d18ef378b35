"""What a small organisation notices of a large one on the same server: `python -m bench.fairness`.

The small one sends 20 requests, one after another; first alone, then while the large one has 40 in flight all the time.
Its median time to first token should stay within twice what it is alone, plus two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from syringa.bench.load import Completion, Target, complete, first_model
from syringa.bench.processes import Server, cores, start
from syringa.bench.report import number
from syringa.bench.runner import syringa_server
from syringa.bench.workload import Prompts
from syringa.errors import StartupError

RESULTS = Path(__file__).resolve().parent / "results"
# Limits are not what is measured here: the large organisation would be held back by them, and the server be idle.
EXTRA_FLAGS = ["--requests-per-minute", "0"]
SMALL, LARGE = "small-organisation", "large-organisation"  # each key is an organisation of its own
REQUESTS, STREAMS = 20, 40
TOKENS = 64  # that the large one's answers have
SMALL_TOKENS = 4  # the small one's: its first token is what counts, and it takes as long to wait for the rest
PAUSE = 0.3  # seconds between its requests at most, so that they meet steps at any of their moments
VARIANTS = {  # prompt tokens of the small one and of the large one
    "100 beside 100": (100, 100),
    "1,000 beside 1,000": (1000, 1000),
    "100 beside 1,000": (100, 1000),
}


class Result(msgspec.Struct, kw_only=True):
    """One variant, in seconds."""

    variant: str
    alone: list[float]
    beside: list[float]
    step: float  # mean while both were there
    large_requests: int  # that ended in that time
    large_tokens_per_second: float

    @property
    def allowed(self) -> float:
        return 2 * statistics.median(self.alone) + 2 * self.step

    @property
    def kept(self) -> bool:
        return statistics.median(self.beside) <= self.allowed


class Crowd:
    """The large organisation: as many streams as were asked for, each with its next request when the last has ended."""

    def __init__(self, url: str, model: str, prompts: Prompts, length: int) -> None:
        self.ended: list[tuple[float, Completion]] = []  # when, and what
        self._target = Target(url, LARGE)
        self._model, self._prompts, self._length = model, prompts, length
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        """Once half as many answers have ended as there are streams: by then they are at all stages."""
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        while len(self.ended) < STREAMS // 2:
            await asyncio.sleep(0.05)
            self.check()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self) -> None:
        while True:
            body = _body(self._model, self._prompts.text(self._length), TOKENS)
            answer = await complete(self._target, **body)
            if answer.error:
                raise StartupError(f"a request of the large organisation failed: {answer.error}")
            self.ended.append((time.perf_counter(), answer))


def _body(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def _small(url: str, model: str, prompts: Prompts, length: int, requests: int) -> list[float]:
    """Times to first token."""
    target, pauses, times = Target(url, SMALL), random.Random(0), []
    for _ in range(requests):
        answer = await complete(target, **_body(model, prompts.text(length), SMALL_TOKENS))
        if answer.error:
            raise StartupError(f"a request of the small organisation failed: {answer.error}")
        times.append(answer.time_to_first_token)
        await asyncio.sleep(pauses.uniform(0, PAUSE))
    return times


async def measure(url: str, model: str, variant: str, requests: int) -> Result:
    own, other = VARIANTS[variant]
    prompts = Prompts(f"fairness {variant}")
    await _small(url, model, prompts, own, 3)  # warms up
    alone = await _small(url, model, prompts, own, requests)
    async with Crowd(url, model, prompts, other) as crowd:
        begun = time.perf_counter()
        beside = await _small(url, model, prompts, own, requests)
        seconds = time.perf_counter() - begun
        crowd.check()
        there = [answer for ended, answer in crowd.ended if ended > begun]
    if not there:
        raise StartupError("no request of the large organisation ended: it was no load")
    # A stream gets one token a step, so the mean time between two is the mean step.
    gaps = [(each.token_times[-1] - each.token_times[0]) / (each.output_tokens - 1) for each in there]
    return Result(
        variant=variant,
        alone=alone,
        beside=beside,
        step=statistics.fmean(gaps),
        large_requests=len(there),
        large_tokens_per_second=sum(each.output_tokens for each in there) / seconds,
    )


def server() -> Server:
    plain = syringa_server()
    flags = ["--api-key", SMALL, "--api-key", LARGE, *EXTRA_FLAGS]
    return msgspec.structs.replace(plain, command=lambda port, streams: [*plain.command(port, streams), *flags])


COLUMNS = (
    "prompt tokens",
    "alone, ms",
    "beside 40, ms",
    "most, ms",
    "a step, ms",
    "allowed, ms",
    "large, tok/s",
    "kept",
)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    found = []
    for each in results:
        figures = [
            statistics.median(each.alone), statistics.median(each.beside), max(each.beside), each.step, each.allowed,
        ]  # fmt: skip
        shown = [number(1000 * figure) for figure in figures]
        found.append((each.variant, *shown, number(each.large_tokens_per_second), "yes" if each.kept else "NO"))
    return found


def write(results: list[Result], about: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"about": about, "requests": REQUESTS, "streams": STREAMS, "results": results}
    (RESULTS / "fairness.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    lines = ["# A small organisation beside a large one", ""]
    lines += [
        "| " + " | ".join(row) + " |" for row in (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows(results))
    ]
    lines += [
        "",
        f"The small organisation's median time to first token over {REQUESTS} requests, one after another: alone, and "
        f"while the large one has {STREAMS} requests in flight all the time, of {TOKENS} tokens each. Allowed is twice "
        "the time alone plus two steps.",
        "",
        about,
    ]
    (RESULTS / "fairness.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first variant with 5 requests, results not kept")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if (load := os.getloadavg()[0]) > 0.5:
        console.print(f"[yellow]this machine is busy (load {load:.1f}): times will be too long, not all by as much[/]")
    results = []
    try:
        with start(server(), STREAMS) as running:
            model = first_model(running.url, api_key=SMALL)
            for variant in list(VARIANTS)[: 1 if options.quick else None]:
                console.print(f"{variant} …")
                found = measure(running.url, model, variant, 5 if options.quick else REQUESTS)
                results.append(asyncio.run(found))
                console.print(
                    "  " + ", ".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, rows(results)[-1], strict=True))
                )
    except StartupError as error:
        console.print(f"[red]{error.message}[/]", markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: server stopped, nothing written[/]")
        return 130
    table = Table(*COLUMNS, title="Time to first token of a small organisation beside a large one")
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    if not options.quick:
        machine = f"{_cpu_name()}, {cores()} cores, load {load:.1f} before it began"
        write(results, f"{datetime.date.today().isoformat()}, SmolLM2-135M, {machine}.")
        console.print(f"written: {os.path.relpath(RESULTS)}/fairness.json, fairness.md")
    return 0 if all(each.kept for each in results) else 1


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
