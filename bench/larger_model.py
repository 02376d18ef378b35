"""Compare Syringa with llama.cpp's server on a model with 4-bit weights: `make bench MODELS=1`.

    python -m bench.larger_model                       qwen2.5-coder-1.5b of the catalog (`syringa pull` fetches it)
    python -m bench.larger_model --model FILE.gguf     another file
    python -m bench.larger_model --quick               one round with short answers: does everything work?

One server runs at a time, and rounds are interleaved. Both are started once for each number of streams, with as many
slots of 2,048 tokens. The read bandwidth of the machine is measured right before and after each server's runs. In the
first round, 16 prompts of about 1,900 tokens fill the slots, after which memory is measured again: it takes minutes.
"""

from __future__ import annotations

import argparse
import datetime
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.pages import replace_section
from bench.peers import CONTEXT, setup_llamacpp
from syringa.bench import processes
from syringa.bench.processes import ServerSpec, cores, cpu_name
from syringa.bench.report import LoadSample, ServerRun, Spread, make_spread, spread_text
from syringa.bench.runner import BenchRunner, syringa_server
from syringa.bench.workload import Workload
from syringa.errors import SyringaError
from syringa.modelfiles import locate
from syringa.modelfiles.gguf import read_gguf

DEFAULT = "qwen2.5-coder-1.5b"
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
OURS, PEER = "syringa", "llama.cpp"
STREAMS = (1, 8, 16)
READ_BYTES = 2**30  # per thread, about as much as the weights of a step; caches hold 3 % of it
READ_PASSES = 9
FILL_TOKENS = 1900  # of 2,048: tokenizers differ by a few percent


class LargerModelRun(msgspec.Struct, kw_only=True):
    """One server in one round."""

    run: ServerRun
    bandwidth: float  # bytes per second, mean of before the server was started and after it was stopped
    bytes_per_token: int

    def sample(self, streams: int) -> LoadSample | None:
        return next((sample for sample in self.run.samples if sample.streams == streams), None)


class Row(msgspec.Struct, kw_only=True):
    """A line of the table. `met` is None without a target, or if it could not be measured."""

    key: str
    title: str
    values: dict[str, Spread]
    ratio: float | None = None  # of medians, Syringa ÷ llama.cpp
    target: str = ""
    met: bool | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for Syringa's worst measurement or median, or for the ratio of the medians."""

    text: str
    value: Callable[[Spread, float | None], float | None]
    at_most: float | None = None
    at_least: float | None = None

    def met(self, ours: Spread, ratio: float | None) -> bool | None:
        value = self.value(ours, ratio)
        if value is None:
            return None
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is None or value >= self.at_least


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(highlight=False)
    workload = Workload(
        streams=STREAMS,
        requests={1: 3},
        first_token_repeats=1,
        tail_tokens=0,
        warm_up_requests=2,
        output_tokens=64,
        fill_tokens=FILL_TOKENS,
    )
    if options.quick:
        workload = msgspec.structs.replace(workload.quick(), output_tokens=16, fill_tokens=50)
    try:
        path = Path(locate(options.model).path)
        bytes_per_token = weight_bytes(path)
        servers = [_syringa(path), setup_llamacpp(path, weights="the file's")]
    except SyringaError as error:
        console.print(f"[red]{escape(error.message)}[/]")
        return 1
    if (load := os.getloadavg()[0]) > 0.5:
        console.print(f"[yellow]this machine is busy (load {load:.1f}): the ratios will not be fair[/]")
    runs: list[LargerModelRun] = []
    try:
        fill_page_cache(servers)
        for number in range(1, 2 if options.quick else options.rounds + 1):
            for server in servers:
                console.print(f"[bold]round {number}: {server.name}[/]")
                before = read_bandwidth(cores())
                run = BenchRunner(workload, console.print).measure(server, number)
                bandwidth = (before + read_bandwidth(cores())) / 2
                runs.append(LargerModelRun(run=run, bandwidth=bandwidth, bytes_per_token=bytes_per_token))
            # After each round, so that an interrupted run leaves results.
            _report(console, runs, workload, options, path)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: servers stopped; complete rounds are kept[/]")
        return 130
    return 1 if any(each.run.error for each in runs) else 0


def fill_page_cache(servers: Sequence[ServerSpec]) -> None:
    """Start and stop each server once, so that timed starts find program and weights in the page cache."""
    for server in servers:
        with suppress(SyringaError), processes.start(server, 1):  # the first round reports a server that does not start
            pass


def weight_bytes(path: Path) -> int:
    """Return the bytes of weights that one token reads: of experts those used, and of the embeddings only a row."""
    file = read_gguf(path)
    prefix = file.metadata.get("general.architecture")
    used, experts = (file.metadata.get(f"{prefix}.expert_{name}") for name in ("used_count", "count"))
    tied = "output.weight" not in file.tensors
    total = 0.0
    for name, tensor in file.tensors.items():
        if tied or name != "token_embd.weight":
            total += tensor.size * used / experts if used and experts and "_exps." in name else tensor.size
    return int(total)


def read_bandwidth(threads: int, size: int = READ_BYTES) -> float:
    """Return the median rate in bytes per second at which `threads` threads together read memory.

    As in a step of the model, each reads its own part once, front to back, from huge pages.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages by default
    parts = [mmap.mmap(-1, size, flags=private) for _ in range(threads)]
    for part in parts:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            part.madvise(mmap.MADV_HUGEPAGE)
    arrays = [np.frombuffer(part, dtype=np.int64) for part in parts]
    times: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        for array in arrays:
            array.fill(1)  # or all of it would be the one page of zeros
        list(pool.map(np.max, arrays))
        for _ in range(READ_PASSES):
            begun = time.perf_counter()
            list(pool.map(np.max, arrays))  # releases the GIL, and does less arithmetic than a sum
            times.append(time.perf_counter() - begun)
    return threads * size / statistics.median(times)


def summarize_rows(runs: Sequence[LargerModelRun]) -> list[Row]:
    """Return the table: medians and ranges per server, ratios of the medians, and the targets."""
    rows = [
        _row("ready", "ready after start (to the first token), s", runs, lambda each: each.run.starts, _STARTS),
        _row("token_time", "1 stream, time per token, ms", runs, _token_times, _at_most(1.05)),
        _row("bandwidth_share", "the same, % of the read bandwidth", runs, _bandwidth_shares, _SHARE),
        *(_row(f"streams_{count}", f"{count} streams, tok/s", runs, _rates(count), _at_least(3)) for count in (8, 16)),
        _row("first_token_100", "first token, 100-token prompt, ms", runs, _short_first_tokens),
        _row("first_token_1000", "first token, 1,000-token prompt, ms", runs, _long_first_tokens, _at_most(0.35)),
        _row("memory", "memory (PSS), 16 slots of 2,048 tokens, MiB", runs, _memory, _at_most(0.8)),
        _row("resident", "the same as RSS, MiB", runs, _resident),
        _row("filled_memory", "memory (PSS) with all slots full, one round, MiB", runs, _filled_memory, _at_most(0.8)),
        _row(
            "bandwidth",
            "read bandwidth before and after, GB/s",
            runs,
            lambda each: [each.bandwidth / 1e9],
            compared=False,
        ),
    ]
    return [row for row in rows if row.values]


def _row(
    key: str,
    title: str,
    runs: Sequence[LargerModelRun],
    measured: Callable[[LargerModelRun], list[float]],
    target: Target | None = None,
    *,
    compared: bool = True,
) -> Row:
    values: dict[str, Spread] = {}
    for server in (OURS, PEER):
        spread = make_spread([value for each in runs if each.run.server == server for value in measured(each)])
        if spread:
            values[server] = spread
    row = Row(key=key, title=title, values=values)
    ours, peer = values.get(OURS), values.get(PEER)
    if compared and ours and peer and peer.median:
        row.ratio = ours.median / peer.median
    if target:
        row.target = target.text
        row.met = target.met(ours, row.ratio) if ours else None
    return row


def _at_most(ratio: float) -> Target:
    return Target(text=f"≤ {ratio:g} ×", value=lambda _, found: found, at_most=ratio)


def _at_least(ratio: float) -> Target:
    return Target(text=f"≥ {ratio:g} ×", value=lambda _, found: found, at_least=ratio)


_STARTS = Target(text="≤ 6 s, every start", value=lambda ours, _: ours.high, at_most=6)
_SHARE = Target(text="≥ 85 %", value=lambda ours, _: ours.median, at_least=85)


def _token_times(each: LargerModelRun) -> list[float]:
    sample = each.sample(1)
    return [1000 * sample.between_tokens_median] if sample else []


def _bandwidth_shares(each: LargerModelRun) -> list[float]:
    sample = each.sample(1)
    return [100 * each.bytes_per_token / sample.between_tokens_median / each.bandwidth] if sample else []


def _rates(streams: int) -> Callable[[LargerModelRun], list[float]]:
    def rates(each: LargerModelRun) -> list[float]:
        sample = each.sample(streams)
        return [sample.tokens_per_second] if sample else []

    return rates


def _short_first_tokens(each: LargerModelRun) -> list[float]:
    sample = each.sample(1)
    return [1000 * sample.first_token_median] if sample else []


def _long_first_tokens(each: LargerModelRun) -> list[float]:
    return [1000 * seconds for seconds in each.run.long_first_token]


def _memory(each: LargerModelRun) -> list[float]:
    return [each.run.memory_bytes / 2**20] if each.run.memory_bytes else []


def _filled_memory(each: LargerModelRun) -> list[float]:
    return [each.run.filled_memory_bytes / 2**20] if each.run.filled_memory_bytes else []


def _resident(each: LargerModelRun) -> list[float]:
    return [each.run.resident_bytes / 2**20] if each.run.resident_bytes else []


def _syringa(model: Path) -> ServerSpec:
    server = syringa_server(str(model))

    def command(port: int, streams: int) -> list[str]:
        limits = ["--max-model-len", str(CONTEXT), "--kv-cache-tokens", str(streams * CONTEXT)]
        return [*server.command(port, streams), *limits]

    return msgspec.structs.replace(
        server, command=command, precision="the file's weights, int8 activations", slots_per_stream_count=True
    )


# Report -------------------------------------------------------------------------------------------------------------


def _report(
    console: Console, runs: Sequence[LargerModelRun], workload: Workload, options: argparse.Namespace, model: Path
) -> None:
    rows = summarize_rows(runs)
    rounds = max(each.run.round for each in runs)
    name = str(read_gguf(model).metadata.get("general.name") or model.stem)
    shape = f"prompts of {workload.prompt_tokens} and answers of {workload.output_tokens} tokens"
    console.print(_table(rows, f"{name} on {cores()} cores, {shape}, rounds: {rounds}"))
    failures = [f"{each.run.server}, round {each.run.round}: {each.run.error}" for each in runs if each.run.error]
    for failure in failures:
        console.print(f"[red]FAILED: {escape(failure)}[/]")
    if options.quick:
        console.print("A quick run only shows that everything works; its figures are not written.")
        return
    day = datetime.date.today().isoformat()
    about = {"day": day, "cpu": cpu_name(), "cores": cores(), "rounds": rounds, "model": name, "workload": workload}
    document = {**about, "rows": rows, "runs": list(runs)}
    path = RESULTS / f"cpu-larger-model-{day}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    console.print(f"written: {os.path.relpath(path)}")
    if options.write:
        write_page(f"{day}, {cpu_name()}, {cores()} cores, {rounds} interleaved rounds.", rows, failures)
        console.print(f"written: {os.path.relpath(PAGE)}")


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = "Medians, least to most in brackets; ratios are ratios of medians."
    table.add_column("")
    for name in (OURS, PEER, "ratio", "target", "met"):
        table.add_column(name, justify="right")
    for row in rows:
        style = "red" if row.met is False else None
        table.add_row(*_cells(row), style=style)
    return table


def write_page(about: str, rows: Sequence[Row], failures: Sequence[str], page: Path = PAGE) -> None:
    """Replace the table in the page, between its markers. Raises `ValueError` if they are missing."""
    lines = [about, "", "| | Syringa | llama.cpp | ÷ llama.cpp | target | met |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | --- |", *("| " + " | ".join(_cells(row)) + " |" for row in rows)]
    lines += [f"\nFAILED: {failure.splitlines()[0]}" for failure in failures]
    replace_section(page, "larger model", lines)


def _cells(row: Row) -> list[str]:
    measured = [spread_text(row.values.get(server)) for server in (OURS, PEER)]
    ratio = f"{row.ratio:.2f} ×" if row.ratio is not None else ""
    return [row.title, *measured, ratio, row.target, {True: "yes", False: "no", None: ""}[row.met]]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.larger_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT, help=f"name or GGUF file (default: {DEFAULT})")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round with short answers, results not written")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md as well")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
