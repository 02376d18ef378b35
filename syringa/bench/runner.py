"""Run the benchmark workload against servers. `run_syringa_bench` implements `syringa bench`."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from syringa.bench import processes
from syringa.bench.load import CompletionResult, LoadResult, Prompt, first_model, run_load
from syringa.bench.processes import RunningServer, ServerSpec
from syringa.bench.report import LoadSample, ServerRun, render_table, summarize, write_json
from syringa.bench.workload import PromptGenerator, Workload
from syringa.errors import StartupError, SyringaError

Log = Callable[[str], None]
BUSY_SHARE = 0.2  # of one core, above which other processes spoil a measurement
_FILL_OUTPUT_TOKENS = 8
_FILL_TIMEOUT = 3600.0  # seconds: the last of 16 long prompts waits for all others


def syringa_server(model: str | None = None) -> ServerSpec:
    """Return the spec of `syringa serve` of this installation."""
    chosen = ["--model", model] if model else []
    return ServerSpec(
        name="syringa",
        version="this tree",
        precision="int8 weights and activations",
        command=lambda port, streams: [sys.executable, "-m", "syringa", "serve", "--port", str(port), *chosen],
        # The user's SYRINGA_* settings must not reach the server under test.
        environment=dict.fromkeys(name for name in os.environ if name.startswith("SYRINGA_")),
    )


class BenchRunner:
    """Run the parts of a workload against one server and collect the measurements."""

    def __init__(self, workload: Workload, log: Log, *, seed: int = 0, api_key: str | None = None) -> None:
        self._workload = workload
        self._log = log
        self._seed = seed
        self._api_key = api_key
        self._model: str | None = None

    def measure(self, server: ServerSpec, round_number: int) -> ServerRun:
        """Start the server, run the workload and stop it. A failure is recorded beside what was measured before."""
        run = ServerRun(
            server=server.name, version=server.version, precision=server.precision, round=round_number, samples=[]
        )
        counts = self._workload.streams
        groups = [(count,) for count in counts] if server.slots_per_stream_count else [counts]
        # Long prompts are sent one at a time, so they run with the fewest slots.
        try:
            for group in groups:
                with processes.start(server, max(group)) as running:
                    self._measure_started(run, running, group, first_tokens=group is groups[0])
        except SyringaError as error:
            run.error = error.message
            self._log(f"[red]{server.name}: {escape(error.message)}[/]")
        return run

    def measure_running(self, url: str, model: str | None, round_number: int) -> ServerRun:
        """Run the workload against a server that is already running, without memory, CPU and startup figures."""
        run = ServerRun(server=url, version="", precision="", round=round_number, samples=[])
        self._model = model or first_model(url, api_key=self._api_key)
        try:
            self._measure_streams(run, url, None, self._workload.streams)
            self._measure_first_tokens(run, url)
        except SyringaError as error:
            run.error = error.message
            self._log(f"[red]{url}: {escape(error.message)}[/]")
        return run

    def _measure_started(
        self, run: ServerRun, running: RunningServer, group: Sequence[int], *, first_tokens: bool
    ) -> None:
        prompts = self._prompts(run.round, "start", max(group))
        self._model = first_model(running.url, api_key=self._api_key)
        self._load(running.url, [prompts.text(10)], streams=1, output_tokens=1)
        started = time.perf_counter() - running.started_at
        run.starts.append(started)
        if first_tokens:
            run.start_seconds = started
        self._log(f"{run.server}: started, first token after {started:.1f} s")
        self._measure_streams(run, running.url, running.pid, group)
        if first_tokens:
            self._measure_first_tokens(run, running.url)

    def _measure_streams(self, run: ServerRun, url: str, pid: int | None, group: Sequence[int]) -> None:
        for streams in group:
            prompts = self._prompts(run.round, "streams", streams)
            size = self._workload.prompt_tokens, self._workload.prompt_spread
            # Warms up kernels, thread pools and allocators; too many requests would take slow servers minutes.
            warm_up = [prompts.around(*size) for _ in range(min(streams, self._workload.warm_up_requests))]
            self._load(url, warm_up, streams=streams, output_tokens=8)
            texts = [prompts.around(*size) for _ in range(self._workload.requests_for(streams))]
            before = processes.cpu_seconds(pid) if pid else 0.0
            machine = processes.machine_cpu_seconds() if pid else 0.0
            load = self._load(url, texts, streams=streams, output_tokens=self._workload.output_tokens)
            used = processes.cpu_seconds(pid) - before if pid else None
            sample = summarize_load(load, used, self._workload.output_tokens)
            if used is not None:
                others = processes.machine_cpu_seconds() - machine - used - load.client_cpu_seconds
                sample.other_cpu_share = max(0.0, others) / load.seconds
            run.samples.append(sample)
            if streams == 16 and pid:
                run.memory_bytes, run.resident_bytes = processes.memory_pss(pid), processes.memory_rss(pid)
                if self._workload.fill_tokens and run.round == 1:
                    self._fill_slots(run, url, pid, streams)
            self._log(
                f"{run.server}: {streams} at once, {sample.tokens_per_second:.1f} tok/s, first token "
                f"{sample.first_token_median * 1000:.0f} ms, client {sample.client_cpu_share:.1%} of a core"
            )
            share = sample.other_cpu_share
            if share is not None and share > BUSY_SHARE:
                self._log(f"[yellow]other processes used {share:.1f} cores: the figures do not count[/]")

    def _fill_slots(self, run: ServerRun, url: str, pid: int, streams: int) -> None:
        """Measure the memory after a long prompt in each slot: some servers take that of their cache as it fills."""
        prompts = self._prompts(run.round, "fill", streams)
        texts = [prompts.text(self._workload.fill_tokens) for _ in range(streams)]
        load = self._load(url, texts, streams=streams, output_tokens=_FILL_OUTPUT_TOKENS, timeout=_FILL_TIMEOUT)
        run.filled_memory_bytes = processes.memory_pss(pid)
        run.filled_tokens = sum((each.prompt_tokens or 0) + each.output_tokens for each in load.succeeded)
        self._log(
            f"{run.server}: {run.filled_memory_bytes / 2**20:,.0f} MiB with {run.filled_tokens:,} tokens in {streams} "
            "slots"
        )

    def _measure_first_tokens(self, run: ServerRun, url: str) -> None:
        prompts = self._prompts(run.round, "first tokens", 0)
        for _ in range(self._workload.first_token_repeats):
            cold = self._single(url, prompts.text(self._workload.long_tokens))
            run.long_first_token.append(cold.time_to_first_token)
            self._log(
                f"{run.server}: first token of {cold.prompt_tokens} tokens {cold.time_to_first_token * 1000:.0f} ms"
            )
            if not self._workload.tail_tokens:
                continue
            prefix = prompts.text(self._workload.long_tokens)
            self._single(url, prefix)
            cached = self._single(url, prefix + prompts.tail(self._workload.tail_tokens))
            run.cached_first_token.append(cached.time_to_first_token)
            run.cached_tokens = cached.cached_tokens
            self._log(f"{run.server}: first token with the prefix cached {cached.time_to_first_token * 1000:.0f} ms")

    def _single(self, url: str, prompt: Prompt) -> CompletionResult:
        return self._load(url, [prompt], streams=1, output_tokens=4).completions[0]

    def _load(
        self, url: str, prompts: Sequence[Prompt], *, streams: int, output_tokens: int, timeout: float = 600.0
    ) -> LoadResult:
        assert self._model is not None
        load = run_load(
            url,
            prompts,
            model=self._model,
            max_tokens=output_tokens,
            streams=streams,
            api_key=self._api_key,
            timeout=timeout,
            temperature=0,
            ignore_eos=True,
        )
        if load.errors:
            # A server that rejects part of the load would look fast, so the load does not count.
            raise StartupError(
                f"{len(load.errors)} of {len(prompts)} requests failed, the first with: {load.errors[0]}"
            )
        return load

    def _prompts(self, round_number: int, part: str, streams: int) -> PromptGenerator:
        """Return a generator of the same texts for every server of a round, but other ones per round and part."""
        return PromptGenerator(f"{self._seed} {round_number} {part} {streams}")


def summarize_load(load: LoadResult, server_cpu_seconds: float | None, expected_tokens: int) -> LoadSample:
    """Compute the figures of one load. Raises `StartupError` if a completion has another length than expected."""
    done = load.succeeded
    wrong_lengths = [each.output_tokens for each in done if each.output_tokens != expected_tokens]
    if wrong_lengths:
        raise StartupError(
            f"{len(wrong_lengths)} completions have {min(wrong_lengths)} to {max(wrong_lengths)} tokens, "
            f"not {expected_tokens}: does the server support ignore_eos?"
        )
    counts = [each.prompt_tokens for each in done if each.prompt_tokens is not None]
    gaps = [
        (each.last_token_time - each.token_times[0]) / (each.output_tokens - 1)
        for each in done
        if each.output_tokens > 1
    ]
    return LoadSample(
        streams=load.streams,
        requests=len(done),
        output_tokens=load.output_tokens,
        seconds=load.seconds,
        tokens_per_second=load.tokens_per_second,
        first_token_median=statistics.median(each.time_to_first_token for each in done),
        first_token_max=max(each.time_to_first_token for each in done),
        between_tokens_median=statistics.median(gaps) if gaps else 0.0,
        client_cpu_share=load.client_cpu_share,
        server_cpu_seconds=server_cpu_seconds,
        prompt_tokens=(min(counts), max(counts)) if counts else None,
    )


def run_syringa_bench(
    *,
    url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    streams: Sequence[int] = (1, 4, 16, 64),
    repeats: int = 3,
    quick: bool = False,
    output: Path | None = None,
    console: Console | None = None,
) -> list[ServerRun]:
    """Measure a running server at `url`, or start `syringa serve`. Prints a table and writes JSON to `output`.

    Raises `StartupError` if nothing could be measured.
    """
    console = console or Console()
    workload = Workload(streams=tuple(sorted(set(streams))))
    if not workload.streams or workload.streams[0] < 1 or repeats < 1:
        raise StartupError("nothing to measure: streams and repeats are numbers from 1")
    if quick:
        workload, repeats = workload.quick(), 1
    bench = BenchRunner(workload, console.print, api_key=api_key)
    runs: list[ServerRun] = []
    for number in range(1, repeats + 1):
        console.print(f"[bold]repeat {number} of {repeats}[/]")
        if url:
            runs.append(bench.measure_running(url.rstrip("/"), model, number))
        else:
            runs.append(bench.measure(syringa_server(model), number))
        if runs[-1].error and not runs[-1].samples:
            raise StartupError(f"nothing was measured: {runs[-1].error}")
    console.print(render_table(summarize(runs)))
    if output:
        write_json(output, runs)
    return runs
