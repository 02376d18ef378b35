"""Compare TCP with TLS to the Unix socket between a client and a model worker: `python -m bench.transport`.

One worker listens at both, so that weights, caches and memory are the same. Each pair measures both, one after the
other, in alternating order: the output tokens per second of 16 streams, and the time to the first token of single
requests.

    python -m bench.transport              12 pairs
    python -m bench.transport --write      write the table to docs/performance.md as well
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import uvloop

from bench.pages import replace_section
from syringa.bench.processes import cores, cpu_name
from syringa.cluster.folder import ClusterFolder
from syringa.config import Config, single_model_spec
from syringa.engine.client import protocol
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.processes import managed_process
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import StartupError
from syringa.types import EngineDelta, EngineRequest, SamplingParams, StopConditions

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
PAIRS, STREAMS, TOKENS, PROMPT_TOKENS = 12, 16, 64, 100
REQUESTS = 2 * STREAMS  # of a measurement of tokens per second
FIRST_TOKENS = 10  # requests of a measurement of the first token
MIN_RATIO, MAX_DELAY_MS = 0.97, 2.0


class TransportRun(msgspec.Struct, kw_only=True):
    """One measurement over one transport."""

    transport: str  # "unix" or "tls"
    tokens_per_second: float
    first_token_ms: list[float]

    @property
    def median_first_token_ms(self) -> float:
        return statistics.median(self.first_token_ms)


class TransportBench:
    """Sends requests of random tokens, no two alike, to one worker over both transports."""

    def __init__(self, clients: dict[str, WorkerClient], seed: int) -> None:
        self._clients = clients
        self._random = random.Random(seed)
        self._count = 0

    async def measure(
        self, transport: str, *, requests: int = REQUESTS, first_tokens: int = FIRST_TOKENS
    ) -> TransportRun:
        client = self._clients[transport]
        first = [1000 * (await self._complete(client, 2))[0] for _ in range(first_tokens)]
        left = iter(range(requests))
        received = 0

        async def stream() -> None:
            nonlocal received
            for _ in left:
                _, tokens = await self._complete(client, TOKENS)
                received += tokens

        begun = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        seconds = time.perf_counter() - begun
        if received != requests * TOKENS:
            raise StartupError(f"got {received} tokens instead of {requests * TOKENS}")
        return TransportRun(transport=transport, tokens_per_second=received / seconds, first_token_ms=first)

    async def _complete(self, client: WorkerClient, tokens: int) -> tuple[float, int]:
        """Return the seconds to the first token, and the number of tokens."""
        self._count += 1
        request = EngineRequest(
            id=str(self._count),
            prompt=[self._random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)],
            sampling=SamplingParams(temperature=0.0, seed=1),
            stopping=StopConditions(max_tokens=tokens, ignore_eos=True),
        )
        begun = time.perf_counter()
        first, received = 0.0, 0

        def on_delta(delta: EngineDelta) -> bool:
            nonlocal first, received
            first = first or time.perf_counter() - begun
            received += len(delta.tokens)
            return False

        await client.submit(request, on_delta)
        return first, received


@contextlib.asynccontextmanager
async def connected_clients(model: str) -> AsyncIterator[dict[str, WorkerClient]]:
    """Start a worker that listens at both transports, and connect to each."""
    with tempfile.TemporaryDirectory(prefix="syringa-bench-") as folder:
        cluster = ClusterFolder(Path(folder) / "cluster")
        cluster.create("bench", ["127.0.0.1"])
        config = Config(model=model)
        options = WorkerOptions.from_config(single_model_spec(config), config, str(Path(folder) / "worker.sock"))
        options = msgspec.structs.replace(options, listen="tcp:127.0.0.1:0", tls=cluster.files("server"))
        process = managed_process.spawn("syringa.engine.worker.server", options)
        clients: dict[str, WorkerClient] = {}
        try:
            address = await _remote_address(process, options.socket)
            clients["unix"] = WorkerClient(f"unix:{options.socket}")
            clients["tls"] = WorkerClient(address, tls=cluster.files("client"))
            for client in clients.values():
                client.start()
                await client.wait_ready()
            yield clients
        finally:
            for client in clients.values():
                await client.close()
            await asyncio.to_thread(managed_process.terminate, process, 5.0)


async def _remote_address(process: subprocess.Popen[bytes], path: str) -> str:
    """Wait until the worker is ready, and return the address for clients of other machines."""
    while True:
        if process.poll() is not None:
            raise StartupError("the model worker could not start")
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        decoder = protocol.client_decoder()
        while data := await reader.read(1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, protocol.Ready):
                    writer.close()
                    return message.address
        raise StartupError("the model worker ended while it was loading")


def summarize(runs: list[TransportRun]) -> dict[str, float]:
    """Return medians, their ratio and difference, and the spread of the ratios of pairs."""
    unix = [run for run in runs if run.transport == "unix"]
    tls = [run for run in runs if run.transport == "tls"]
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in zip(unix, tls, strict=True)]
    delays = [b.median_first_token_ms - a.median_first_token_ms for a, b in zip(unix, tls, strict=True)]
    return {
        "unix_tokens_per_second": statistics.median(run.tokens_per_second for run in unix),
        "tls_tokens_per_second": statistics.median(run.tokens_per_second for run in tls),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "unix_first_token_ms": statistics.median(run.median_first_token_ms for run in unix),
        "tls_first_token_ms": statistics.median(run.median_first_token_ms for run in tls),
        "added_first_token_ms": statistics.median(delays),
        "added_first_token_ms_min": min(delays),
        "added_first_token_ms_max": max(delays),
    }


async def measure_pairs(model: str, pairs: int, requests: int) -> list[TransportRun]:
    runs: list[TransportRun] = []
    async with connected_clients(model) as clients:
        bench = TransportBench(clients, seed=1)
        for transport in clients:
            await bench.measure(transport, requests=STREAMS, first_tokens=2)  # warms up
        for pair in range(pairs):
            order = ("unix", "tls") if pair % 2 == 0 else ("tls", "unix")
            for transport in order:
                run = await bench.measure(transport, requests=requests)
                runs.append(run)
                print(
                    f"pair {pair + 1:2}  {transport:4}  {run.tokens_per_second:7.1f} tokens/s  "
                    f"first token {run.median_first_token_ms:6.1f} ms",
                    flush=True,
                )
    return runs


def meets_targets(summary: Mapping[str, float]) -> tuple[bool, bool]:
    """Return whether the rate and the time to the first token are as required."""
    return summary["ratio"] >= MIN_RATIO, summary["added_first_token_ms"] <= MAX_DELAY_MS


def write_page(about: str, summary: Mapping[str, float], page: Path = PAGE) -> None:
    """Replace the table in the page, between its markers. Raises `ValueError` if they are missing."""
    met = ["yes" if each else "no" for each in meets_targets(summary)]
    rates = [f"{summary[f'{name}_tokens_per_second']:.0f}" for name in ("unix", "tls")]
    first = [f"{summary[f'{name}_first_token_ms']:.1f}" for name in ("unix", "tls")]
    ratio = f"{summary['ratio']:.3f} × ({summary['ratio_min']:.3f}–{summary['ratio_max']:.3f})"
    delay = (
        f"{summary['added_first_token_ms']:+.2f} ms "
        f"({summary['added_first_token_ms_min']:+.2f} to {summary['added_first_token_ms_max']:+.2f})"
    )
    rows = [
        [f"{STREAMS} streams, tok/s", *rates, ratio, f"≥ {MIN_RATIO} ×", met[0]],
        [f"first token, {PROMPT_TOKENS}-token prompt, ms", *first, delay, f"≤ {MAX_DELAY_MS:+g} ms", met[1]],
    ]
    lines = [about, "", "| | Unix socket | TCP with TLS | by pairs | target | met |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | --- |", *("| " + " | ".join(row) + " |" for row in rows)]
    replace_section(page, "transport", lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transport", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=Config().model)
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"(default: {PAIRS})")
    parser.add_argument("--quick", action="store_true", help="one pair with few requests; nothing is written")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md as well")
    options = parser.parse_args(arguments)
    pairs, requests = (1, STREAMS) if options.quick else (options.pairs, REQUESTS)
    about = (
        f"{datetime.date.today()}, {options.model}, {cpu_name()}, {cores()} cores, load {os.getloadavg()[0]:.1f} before"
    )
    runs = uvloop.run(measure_pairs(options.model, pairs, requests))
    summary = summarize(runs)
    passed = all(meets_targets(summary))
    print(
        f"{STREAMS} streams: {summary['ratio']:.3f} of the Unix socket's tokens per second "
        f"({summary['ratio_min']:.3f} to {summary['ratio_max']:.3f}, at least {MIN_RATIO} required)\n"
        f"first token: {summary['added_first_token_ms']:+.2f} ms ({summary['added_first_token_ms_min']:+.2f} to "
        f"{summary['added_first_token_ms_max']:+.2f}, at most {MAX_DELAY_MS:+.1f} allowed)"
    )
    if options.quick:
        return 0
    document = {"about": about, "pairs": pairs, "passed": passed, "summary": summary, "runs": runs}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "transport.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    print(f"written: {os.path.relpath(RESULTS)}/transport.json")
    if options.write:
        write_page(f"{datetime.date.today()}, {cpu_name()}, {cores()} cores, {pairs} interleaved pairs.", summary)
        print(f"written: {os.path.relpath(PAGE)}")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StartupError as error:
        sys.exit(f"error: {error.message}")
