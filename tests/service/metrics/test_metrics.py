from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from syringa.errors import ConfigError, EngineError, EngineUnavailable, InvalidRequest, RateLimited
from syringa.service.auth.keys import ANONYMOUS, Caller
from syringa.service.metrics.metrics import Metrics
from syringa.service.usage.accounting import RequestAccounting
from syringa.types import EngineStats

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def account(model: str = "qwen", endpoint: str = CHAT, caller: Caller = ANONYMOUS) -> RequestAccounting:
    """A request that went well: three seconds, ten tokens, the first after one second."""
    made = RequestAccounting([], caller, endpoint, "req-secret")
    made.model, made.user = model, "user-secret"
    made.total_seconds, made.first_token_seconds = 3.0, 1.0
    made.stats.prompt_tokens, made.stats.completion_tokens = 100, 9
    made.stats.cached_tokens, made.stats.reasoning_tokens = 64, 4
    made.stats.queue_seconds = 0.25
    return made


def refused(error: Exception, model: str = "") -> RequestAccounting:
    made = RequestAccounting([], ANONYMOUS, CHAT, "")
    made.model = model
    made.fail(error)
    return made


def parsed(text: bytes) -> Samples:
    samples = [each for family in text_string_to_metric_families(text.decode()) for each in family.samples]
    found = {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


async def scraped(metrics: Metrics, stats: dict[str, EngineStats | None] | None = None) -> Samples:
    return parsed(await metrics.render(stats or {}))


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


def named(samples: Samples, name: str) -> Iterator[dict[str, str]]:
    return (dict(labels) for found, labels in samples if found == name)


async def test_a_request_is_counted_with_its_times_and_tokens() -> None:
    metrics = Metrics("syringa_")
    metrics(account())
    metrics(account())
    found = await scraped(metrics)
    ended = {"model_name": "qwen", "endpoint": CHAT, "outcome": "ok", "status": "200"}
    assert value(found, "syringa_requests_total", **ended) == 2
    assert value(found, "syringa_request_success_total", model_name="qwen", finished_reason="stop") == 2
    sums = {
        "time_to_first_token_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "time_per_output_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.5,
        "e2e_request_latency_seconds": 6.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 4.0,
        "request_prompt_tokens": 200.0,
        "request_generation_tokens": 18.0,
    }
    for name, total in sums.items():
        assert value(found, f"syringa_{name}_sum", model_name="qwen") == pytest.approx(total), name
        assert value(found, f"syringa_{name}_count", model_name="qwen") == 2, name
    assert value(found, "syringa_time_to_first_token_seconds_bucket", model_name="qwen", le="0.75") == 0
    assert value(found, "syringa_time_to_first_token_seconds_bucket", model_name="qwen", le="1.0") == 2
    assert value(found, "syringa_inter_token_latency_seconds_bucket", model_name="qwen", le="0.2") == 0
    assert value(found, "syringa_inter_token_latency_seconds_bucket", model_name="qwen", le="0.3") == 2
    assert value(found, "syringa_cached_tokens_total", model_name="qwen") == 128
    assert value(found, "syringa_reasoning_tokens_total", model_name="qwen") == 8
    assert value(found, "syringa_model_load_seconds_count", model_name="qwen") == 0


async def test_what_was_cut_went_well() -> None:
    metrics = Metrics("syringa_")
    ended = [account(), account(), account()]
    ended[0].stats.truncated = ended[1].stats.truncated = True
    ended[1].cancel()
    for each in ended:
        metrics(each)
    found = await scraped(metrics)
    reasons = {each["finished_reason"]: value(found, "syringa_request_success_total", **each)
               for each in named(found, "syringa_request_success_total")}  # fmt: skip
    assert reasons == {"length": 1, "abort": 1, "stop": 1}


async def test_how_a_request_ended() -> None:
    metrics = Metrics("syringa_")
    cancelled = account()
    cancelled.cancel()
    failed = account()
    failed.fail(EngineError("broken"))
    for each in (
        *(cancelled, failed, refused(InvalidRequest("no")), refused(EngineUnavailable("away"), "qwen")),
        *(refused(RateLimited("slower")), refused(RateLimited("slower"))),
    ):
        metrics(each)
    found = await scraped(metrics)
    counted = {
        (each["model_name"], each["outcome"], each["status"]): value(found, "syringa_requests_total", **each)
        for each in named(found, "syringa_requests_total")
    }
    assert counted == {
        ("qwen", "cancelled", "499"): 1,
        ("qwen", "failed", "500"): 1,
        ("qwen", "failed", "503"): 1,
        ("", "refused", "400"): 1,
        ("", "refused", "429"): 2,
    }
    assert value(found, "syringa_rate_limited_total", endpoint=CHAT) == 2
    reasons = {each["finished_reason"]: value(found, "syringa_request_success_total", **each)
               for each in named(found, "syringa_request_success_total")}  # fmt: skip
    assert reasons == {"abort": 1, "error": 2}
    # What was begun has its times, whatever became of it; how long it took says something only where it went well.
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="qwen") == 2
    assert value(found, "syringa_e2e_request_latency_seconds_count", model_name="qwen") == 0


async def test_one_token_has_no_time_between_tokens() -> None:
    metrics = Metrics("syringa_")
    one = account()
    one.stats.completion_tokens = 1
    metrics(one)
    found = await scraped(metrics)
    assert value(found, "syringa_inter_token_latency_seconds_count", model_name="qwen") == 0
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="qwen") == 1


async def test_waiting_for_a_model_is_counted_apart() -> None:
    metrics = Metrics("syringa_")
    cold = account()
    cold.load_seconds = 0.5
    metrics(cold)
    given_up = refused(EngineUnavailable("it cannot be loaded"), "qwen")
    given_up.load_seconds = 40.0
    metrics(given_up)
    found = await scraped(metrics)
    assert value(found, "syringa_model_load_seconds_sum", model_name="qwen") == 40.5
    assert value(found, "syringa_request_prefill_time_seconds_sum", model_name="qwen") == pytest.approx(0.25)
    assert value(found, "syringa_time_to_first_token_seconds_sum", model_name="qwen") == 1.0


async def test_what_engines_say_is_passed_on() -> None:
    stats = EngineStats(
        running=3, waiting=5, queue_tenants=2, refused=6, blocks_total=100, blocks_free=20, blocks_cached=30,
        preemptions=7, steps=11, step_seconds=2.5, prompt_tokens=1000, cached_tokens=400, output_tokens=77,
    )  # fmt: skip
    found = await scraped(Metrics("vllm:"), {"qwen": stats, "cold": None, "empty": EngineStats()})
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "queue_tenants": 2,
        "queue_refused_total": 6,
        "kv_cache_usage_perc": 0.5,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 77,
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 400,
        "num_preemptions_total": 7,
        "step_duration_seconds_sum": 2.5,
        "step_duration_seconds_count": 11,
        "model_loaded": 1,
    }
    for name, figure in expected.items():
        assert value(found, f"vllm:{name}", model_name="qwen") == figure, name
        assert (value(found, f"vllm:{name}", model_name="cold") is None) == (name != "model_loaded")
    assert value(found, "vllm:model_loaded", model_name="cold") == 0
    assert value(found, "vllm:kv_cache_usage_perc", model_name="empty") == 0


async def test_the_process_and_the_version() -> None:
    found = await scraped(Metrics(""))
    assert [each["version"] for each in named(found, "build_info")]
    if sys.platform == "linux":
        memory = value(found, "process_resident_memory_bytes")
        assert memory is not None
        assert 10e6 < memory < 10e9


async def test_nothing_that_a_client_wrote_becomes_a_label() -> None:
    metrics = Metrics("syringa_")
    caller = Caller(organization="organization-secret", key="key-secret")
    for number in range(50):
        made = account("", "", caller)
        made.request_id = f"req-secret-{number}"
        metrics(made)
    metrics(account(caller=caller))
    text = await metrics.render({})
    assert b"secret" not in text
    found = parsed(text)
    assert sum(1 for _ in named(found, "syringa_requests_total")) == 2
    assert {each["endpoint"] for each in named(found, "syringa_requests_total")} == {"", CHAT}
    names = {name for _, labels in found for name, _ in labels}
    assert names == {"model_name", "endpoint", "outcome", "status", "finished_reason", "le", "version"}


async def test_odd_model_names_stay_inside_their_label() -> None:
    odd = 'a"b\\c\nsyringa_forged 1'
    metrics = Metrics("syringa_")
    metrics(account(odd))
    found = await scraped(metrics, {odd: EngineStats(running=1)})
    assert value(found, "syringa_num_requests_running", model_name=odd) == 1
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name=odd) == 1
    assert not any(name == "syringa_forged" for name, _ in found)


@pytest.mark.parametrize("prefix", ["1x", "a b", "a-b", "a\n", "é", "{"])
def test_a_prefix_that_cannot_be_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        Metrics(prefix)


def test_the_variable_of_another_program_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics = Metrics("syringa_")
    metrics(account())
    found = asyncio.run(scraped(metrics))
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="qwen") == 1
    assert list(tmp_path.iterdir()) == []


# Several processes

PROCESS = """
import asyncio, sys
from tests.service.metrics.test_metrics import account
from syringa.service.metrics.metrics import Metrics
from syringa.types import EngineStats

metrics = Metrics("syringa_", sys.argv[1], index=int(sys.argv[2]))
for line in sys.stdin:
    if line.startswith("count"):
        for _ in range(int(line.split()[1])):
            metrics(account())
        print("done", flush=True)
    else:
        text = asyncio.run(metrics.render({"qwen": EngineStats(output_tokens=5)}))
        print(len(text), flush=True)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
"""


class Process:
    """An API process that counts and is scraped."""

    def __init__(self, folder: Path, index: int) -> None:
        command = [sys.executable, "-c", PROCESS, str(folder), str(index)]
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)

    def _ask(self, line: str) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def count(self, number: int) -> None:
        assert self._ask(f"count {number}") == b"done\n"

    def scrape(self) -> Samples:
        length = int(self._ask("scrape"))
        assert self.process.stdout is not None
        return parsed(self.process.stdout.read(length))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    running: list[Process] = []
    yield running
    for each in running:
        if each.process.returncode is None:
            each.kill()


def total(samples: Samples) -> float | None:
    ended = {"model_name": "qwen", "endpoint": CHAT, "outcome": "ok", "status": "200"}
    first = value(samples, "syringa_time_to_first_token_seconds_count", model_name="qwen")
    bucket = value(samples, "syringa_inter_token_latency_seconds_bucket", model_name="qwen", le="+Inf")
    found: Any = value(samples, "syringa_requests_total", **ended)
    assert found == first == bucket
    return found


def test_whichever_process_is_asked_adds_up_all(tmp_path: Path, processes: list[Process]) -> None:
    processes += [Process(tmp_path, 0), Process(tmp_path, 1)]
    first, second = processes
    first.count(3)
    second.count(4)
    for each in processes:
        found = each.scrape()
        assert total(found) == 7
        # The engine counts for all of them already.
        assert value(found, "syringa_generation_tokens_total", model_name="qwen") == 5
        assert not any("pid" in dict(labels) for _, labels in found)
    both = value(first.scrape(), "process_resident_memory_bytes")

    # One dies: nothing that it counted is lost, and nothing of it is shown as if it lived.
    second.kill()
    files = sorted(each.name for each in tmp_path.iterdir())
    found = first.scrape()
    assert total(found) == 7
    one = value(found, "process_resident_memory_bytes")
    if both is not None:
        assert one is not None
        assert one < 0.75 * both

    # Another takes its place, and its files.
    processes.append(Process(tmp_path, 1))
    processes[-1].count(2)
    assert total(first.scrape()) == total(processes[-1].scrape()) == 9
    assert sorted(each.name for each in tmp_path.iterdir()) == files


def test_a_half_made_file_does_not_stop_a_scrape(tmp_path: Path, processes: list[Process]) -> None:
    """A process begins at the moment of a scrape: its file is there, and empty."""
    processes.append(Process(tmp_path, 0))
    processes[0].count(1)
    (tmp_path / "counter_7.db").touch()
    assert total(processes[0].scrape()) == 1
