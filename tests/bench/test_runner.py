"""The whole workload against the fake server of test_load, without a server process or a model."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from syringa.bench import processes
from syringa.bench.load import CompletionResult, LoadResult
from syringa.bench.processes import RunningServer, ServerSpec
from syringa.bench.runner import BenchRunner, run_syringa_bench, summarize_load, syringa_server
from syringa.bench.workload import PromptGenerator, Workload
from syringa.errors import StartupError
from tests.bench.test_load import FakeServer, serving


class CountingServer(FakeServer):
    """Responds with the requested number of tokens."""

    def to_response_usage(self, body: dict[str, object]) -> object:
        return body["max_tokens"]


def file_console(tmp_path: Path) -> Console:
    return Console(file=(tmp_path / "terminal").open("w"), width=120)


def test_bench_measures_running_server_and_writes_results(tmp_path: Path) -> None:
    fake = CountingServer()
    with serving(fake) as url:
        runs = run_syringa_bench(
            url=url, streams=(4, 1), repeats=2, output=tmp_path / "out.json", console=file_console(tmp_path)
        )
    assert [sample.streams for run in runs for sample in run.samples] == [1, 4, 1, 4]
    assert all(sample.output_tokens == 64 * sample.requests for run in runs for sample in run.samples)
    assert all(len(run.long_first_token) == len(run.cached_first_token) == 2 for run in runs)
    assert runs[0].cached_tokens == 3
    assert len(json.loads((tmp_path / "out.json").read_text())["runs"]) == 2
    assert "tok/s" in (tmp_path / "terminal").read_text()


def test_bench_repeats_only_the_prefix_to_be_cached(tmp_path: Path) -> None:
    fake = CountingServer()
    with serving(fake) as url:
        run_syringa_bench(url=url, streams=(1, 4), repeats=2, console=file_console(tmp_path))
    prompts = [str(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == len(prompts)
    continued = [text for text in prompts if any(other != text and other.startswith(text) for other in prompts)]
    assert len(continued) == 4


def test_bench_sends_same_texts_to_every_server_of_a_round() -> None:
    first, second = CountingServer(), CountingServer()
    workload = Workload(streams=(2,)).quick()
    for fake in (first, second):
        with serving(fake) as url:
            BenchRunner(workload, lambda text: None).measure_running(url, "m", 1)
    assert sorted(str(body["prompt"]) for body in first.bodies) == sorted(str(body["prompt"]) for body in second.bodies)


def test_bench_fails_without_figures_if_server_rejects_requests(tmp_path: Path) -> None:
    fake = CountingServer()
    fake.status = b"503 Busy"
    with serving(fake) as url, pytest.raises(StartupError, match="nothing was measured: 1 of 1 requests failed"):
        run_syringa_bench(url=url, model="m", console=file_console(tmp_path))


@pytest.mark.parametrize("options", [{"streams": ()}, {"streams": (0,)}, {"repeats": 0}])
def test_bench_rejects_empty_workload(options: dict[str, object]) -> None:
    with pytest.raises(StartupError, match="nothing to measure"):
        run_syringa_bench(url="http://127.0.0.1:1", **options)  # type: ignore[arg-type]


@contextmanager
def running(server: ServerSpec, streams: int) -> Iterator[RunningServer]:
    """Take this process for that of the server."""
    yield RunningServer(server.version, os.getpid(), time.perf_counter())


def test_memory_is_measured_again_with_full_slots_in_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start", running)
    fake, sizes = CountingServer(), iter([1000, 3000, 2000])
    monkeypatch.setattr(processes, "memory_pss", lambda pid: next(sizes))
    workload = msgspec.structs.replace(
        Workload(streams=(1, 16), tail_tokens=0, warm_up_requests=1, fill_tokens=1900).quick(), output_tokens=8
    )
    with serving(fake) as url:
        spec = ServerSpec(name="fake", version=url, precision="", command=lambda port, streams: [])
        bench = BenchRunner(workload, lambda text: None)
        first, second = bench.measure(spec, 1), bench.measure(spec, 2)
    assert (first.error, first.memory_bytes, first.filled_memory_bytes) == (None, 1000, 3000)
    assert (second.error, second.memory_bytes, second.filled_memory_bytes) == (None, 2000, None)
    assert first.filled_tokens == 16 * (7 + 8)  # by the usage that the server states
    count = PromptGenerator(0)._count
    long = [body for body in fake.bodies if count(str(body["prompt"])) == 1900]
    assert len({str(body["prompt"]) for body in long}) == len(long) == 16
    assert {body["max_tokens"] for body in long} == {8}


def test_summarize_load_rejects_completions_of_other_length() -> None:
    completion = CompletionResult(sent=0.0, token_times=[0.5, 1.0], finished=1.1, output_tokens=2, prompt_tokens=100)
    load = LoadResult(streams=1, completions=[completion], client_cpu_seconds=0.011)
    with pytest.raises(StartupError, match="ignore_eos"):
        summarize_load(load, None, expected_tokens=64)
    sample = summarize_load(load, 0.4, expected_tokens=2)
    assert sample.tokens_per_second == 2.0
    assert sample.first_token_median == sample.between_tokens_median == 0.5
    assert sample.client_cpu_share == pytest.approx(0.01)
    assert sample.prompt_tokens == (100, 100)
    # Tokens without text, such as end tokens that are ignored, take time as well.
    completion.done, completion.output_tokens = 2.0, 4
    sample = summarize_load(load, None, expected_tokens=4)
    assert (sample.tokens_per_second, sample.between_tokens_median) == (2.0, 0.5)


def test_syringa_server_does_not_inherit_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYRINGA_PORT", "9000")
    server = syringa_server("some-model")
    assert server.environment["SYRINGA_PORT"] is None
    assert server.command(1234, 16)[1:] == ["-m", "syringa", "serve", "--port", "1234", "--model", "some-model"]


def test_prompts_differ_between_parts() -> None:
    assert PromptGenerator("0 1 streams 4").text(50) != PromptGenerator("0 1 streams 16").text(50)
