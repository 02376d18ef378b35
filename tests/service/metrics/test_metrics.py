from __future__ import annotations

import asyncio
import json
import math
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
from syringa.service.metrics.engine_metrics import EngineReport
from syringa.service.metrics.metrics import Metrics
from syringa.service.usage.accounting import RequestAccounting
from syringa.types import EngineStats, HistogramCounts

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def accounting(model: str = "qwen", endpoint: str = CHAT, caller: Caller = ANONYMOUS) -> RequestAccounting:
    """A successful request: three seconds, nine tokens, the first after one second."""
    made = RequestAccounting([], caller, endpoint, "req-secret")
    made.model, made.user = model, "user-secret"
    made.total_seconds, made.first_token_seconds = 3.0, 1.0
    made.stats.prompt_tokens, made.stats.completion_tokens = 100, 9
    made.stats.cached_tokens, made.stats.reasoning_tokens = 64, 4
    made.stats.queue_seconds, made.stats.longest_choice = 0.25, 5
    made.choices, made.max_tokens = 2, 16
    return made


def refused(error: Exception, model: str = "") -> RequestAccounting:
    made = RequestAccounting([], ANONYMOUS, CHAT, "")
    made.model = model
    made.fail(error)
    return made


def parsed(text: bytes) -> Samples:
    samples = [each for family in text_string_to_metric_families(text.decode()) for each in family.samples]
    found = {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}
    assert len(found) == len(samples), "duplicate series"
    return found


async def scraped(metrics: Metrics, stats: dict[str, EngineStats | None] | None = None) -> Samples:
    engines = {model: EngineReport(each, loaded=each is not None) for model, each in (stats or {}).items()}
    return parsed(await metrics.render(engines))


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


def named(samples: Samples, name: str) -> Iterator[dict[str, str]]:
    return (dict(labels) for found, labels in samples if found == name)


async def test_request_times_and_tokens() -> None:
    metrics = Metrics("syringa_")
    metrics.observe(accounting())
    metrics.observe(accounting())
    found = await scraped(metrics)
    ended = {"model_name": "qwen", "endpoint": CHAT, "outcome": "ok", "status": "200"}
    assert value(found, "syringa_requests_total", **ended) == 2
    assert value(found, "syringa_request_success_total", model_name="qwen", finished_reason="stop") == 2
    sums = {
        "time_to_first_token_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 6.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 5.5,
        "request_prompt_tokens": 200.0,
        "request_generation_tokens": 18.0,
        "request_max_num_generation_tokens": 10.0,
        "request_prefill_kv_computed_tokens": 72.0,
        "request_params_n": 4.0,
        "request_params_max_tokens": 32.0,
    }
    for name, total in sums.items():
        assert value(found, f"syringa_{name}_sum", model_name="qwen") == pytest.approx(total), name
        assert value(found, f"syringa_{name}_count", model_name="qwen") == 2, name
    assert value(found, "syringa_time_to_first_token_seconds_bucket", model_name="qwen", le="0.75") == 0
    assert value(found, "syringa_time_to_first_token_seconds_bucket", model_name="qwen", le="1.0") == 2
    assert value(found, "syringa_request_time_per_output_token_seconds_bucket", model_name="qwen", le="0.2") == 0
    assert value(found, "syringa_request_time_per_output_token_seconds_bucket", model_name="qwen", le="0.3") == 2
    assert value(found, "syringa_request_params_n_bucket", model_name="qwen", le="1.0") == 0
    assert value(found, "syringa_request_params_n_bucket", model_name="qwen", le="2.0") == 2
    assert value(found, "syringa_cached_tokens_total", model_name="qwen") == 128
    assert value(found, "syringa_reasoning_tokens_total", model_name="qwen") == 8
    assert value(found, "syringa_model_load_seconds_count", model_name="qwen") == 0


async def test_embedding_request_has_times_and_input_tokens_only() -> None:
    metrics, made = Metrics("syringa_"), accounting(endpoint="/embeddings")
    made.first_token_seconds, made.load_seconds = None, 0.5
    made.stats.completion_tokens = made.stats.cached_tokens = made.stats.reasoning_tokens = 0
    metrics.observe(made)
    found = await scraped(metrics)
    sums = {"e2e_request_latency_seconds": 3, "request_queue_time_seconds": 0.25, "request_prompt_tokens": 100}
    for name, expected in (sums | {"request_inference_time_seconds": 2.25}).items():
        assert value(found, f"syringa_{name}_sum", model_name="qwen") == expected
    for name in ("time_to_first_token_seconds", "request_generation_tokens"):
        assert value(found, f"syringa_{name}_count", model_name="qwen") == 0


async def test_truncated_request_counts_as_length() -> None:
    metrics = Metrics("syringa_")
    ended = [accounting(), accounting(), accounting()]
    ended[0].stats.truncated = ended[1].stats.truncated = True
    ended[1].cancel()
    for each in ended:
        metrics.observe(each)
    found = await scraped(metrics)
    reasons = {each["finished_reason"]: value(found, "syringa_request_success_total", **each)
               for each in named(found, "syringa_request_success_total")}  # fmt: skip
    assert reasons == {"length": 1, "abort": 1, "stop": 1}


async def test_requests_by_outcome() -> None:
    metrics = Metrics("syringa_")
    cancelled = accounting()
    cancelled.cancel()
    failed = accounting()
    failed.fail(EngineError("broken"))
    for each in (
        *(cancelled, failed, refused(InvalidRequest("no")), refused(EngineUnavailable("away"), "qwen")),
        *(refused(RateLimited("slower")), refused(RateLimited("slower"))),
    ):
        metrics.observe(each)
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
    # Every request that began has times; the total latency is of successful requests only.
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="qwen") == 2
    assert value(found, "syringa_e2e_request_latency_seconds_count", model_name="qwen") == 0


async def test_single_token_has_no_time_per_output_token() -> None:
    metrics = Metrics("syringa_")
    one = accounting()
    one.stats.completion_tokens = 1
    metrics.observe(one)
    found = await scraped(metrics)
    assert value(found, "syringa_request_time_per_output_token_seconds_count", model_name="qwen") == 0
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="qwen") == 1


async def test_model_loading_time_is_separate() -> None:
    metrics = Metrics("syringa_")
    cold = accounting()
    cold.load_seconds = 0.5
    metrics.observe(cold)
    given_up = refused(EngineUnavailable("it cannot be loaded"), "qwen")
    given_up.load_seconds = 40.0
    metrics.observe(given_up)
    found = await scraped(metrics)
    assert value(found, "syringa_model_load_seconds_sum", model_name="qwen") == 40.5
    assert value(found, "syringa_request_prefill_time_seconds_sum", model_name="qwen") == pytest.approx(0.25)
    assert value(found, "syringa_time_to_first_token_seconds_sum", model_name="qwen") == 1.0


async def test_engine_metrics() -> None:
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


async def test_engine_histograms_and_cache_configuration() -> None:
    stats = EngineStats(
        waiting=5,
        preparing=2,
        blocks_total=100,
        block_size=16,
        max_length=640,
        step_tokens=HistogramCounts((1, 8), (3, 2, 1), 60.0),
        token_gaps=HistogramCounts((0.1, 0.25), (10, 0, 1), 1.5),
    )
    found = await scraped(Metrics("vllm:"), {"qwen": stats, "cold": None})
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        buckets = {le: value(found, f"vllm:{name}_bucket", model_name="qwen", le=le) for le in ("0.1", "0.25", "+Inf")}
        assert buckets == {"0.1": 10, "0.25": 10, "+Inf": 11}
        assert value(found, f"vllm:{name}_count", model_name="qwen") == 11
        assert value(found, f"vllm:{name}_sum", model_name="qwen") == 1.5
    assert value(found, "vllm:iteration_tokens_total_bucket", model_name="qwen", le="8.0") == 5
    assert value(found, "vllm:iteration_tokens_total_count", model_name="qwen") == 6
    assert value(found, "vllm:iteration_tokens_total_sum", model_name="qwen") == 60
    waiting = {each["reason"]: value(found, "vllm:num_requests_waiting_by_reason", **each)
               for each in named(found, "vllm:num_requests_waiting_by_reason")}  # fmt: skip
    assert waiting == {"capacity": 3, "deferred": 2}
    (labels,) = named(found, "vllm:cache_config_info")
    assert labels == {
        "model_name": "qwen",
        "block_size": "16",
        "num_gpu_blocks": "100",
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "1600",
        "kv_cache_max_concurrency": "2.5",
    }


# The names that vLLM's own test of its metrics expects.
VLLM_NAMES = {
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions_total", "prompt_tokens_total"),
    *("generation_tokens_total", "iteration_tokens_total", "cache_config_info", "request_success_total"),
    *(
        f"{name}_{suffix}"
        for name in (
            *("request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens"),
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
            "request_decode_time_seconds",
        )
        for suffix in ("sum", "bucket", "count")
    ),
}


async def test_metrics_have_all_names_of_vllm() -> None:
    metrics = Metrics("vllm:")
    metrics.observe(accounting())
    text = (await metrics.render({"qwen": EngineReport(EngineStats())})).decode()
    assert {name for name in VLLM_NAMES if f"vllm:{name}" not in text} == set()


async def test_process_memory_and_version() -> None:
    found = await scraped(Metrics(""))
    assert [each["version"] for each in named(found, "build_info")]
    if sys.platform == "linux":
        memory = value(found, "process_resident_memory_bytes")
        assert memory is not None
        assert 10e6 < memory < 10e9


async def test_labels_contain_no_client_data() -> None:
    metrics = Metrics("syringa_")
    caller = Caller(organization="organization-secret", key="key-secret")
    for number in range(50):
        made = accounting("", "", caller)
        made.request_id = f"req-secret-{number}"
        metrics.observe(made)
    metrics.observe(accounting(caller=caller))
    text = await metrics.render({})
    assert b"secret" not in text
    found = parsed(text)
    assert sum(1 for _ in named(found, "syringa_requests_total")) == 2
    assert {each["endpoint"] for each in named(found, "syringa_requests_total")} == {"", CHAT}
    names = {name for _, labels in found for name, _ in labels}
    assert names == {"model_name", "endpoint", "outcome", "status", "finished_reason", "le", "version"}


async def test_model_names_are_escaped() -> None:
    odd = 'a"b\\c\nsyringa_forged 1'
    metrics = Metrics("syringa_")
    metrics.observe(accounting(odd))
    found = await scraped(metrics, {odd: EngineStats(running=1)})
    assert value(found, "syringa_num_requests_running", model_name=odd) == 1
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name=odd) == 1
    assert not any(name == "syringa_forged" for name, _ in found)


@pytest.mark.parametrize("prefix", ["1x", "a b", "a-b", "a\n", "é", "{"])
def test_invalid_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        Metrics(prefix)


def test_environment_variable_of_prometheus_client_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics = Metrics("syringa_")
    metrics.observe(accounting())
    found = asyncio.run(scraped(metrics))
    assert value(found, "syringa_time_to_first_token_seconds_count", model_name="qwen") == 1
    assert list(tmp_path.iterdir()) == []


# Several processes

PROCESS = """
import asyncio, json, sys
from tests.service.metrics.test_metrics import accounting
from syringa.service.metrics.engine_metrics import EngineReport
from syringa.service.metrics.metrics import Metrics
from syringa.types import EngineStats

metrics = Metrics("syringa_", sys.argv[1], index=int(sys.argv[2]))
for line in sys.stdin:
    if line.startswith("count"):
        for _ in range(int(line.split()[1])):
            metrics.observe(accounting())
        print("done", flush=True)
    elif line.startswith("route"):
        metrics.count_move("qwen", "drain", True)
        metrics.count_route("qwen", line.split()[1] == "known")
        print(json.dumps(metrics.summarize_replicas()), flush=True)
    else:
        text = asyncio.run(metrics.render({"qwen": EngineReport(EngineStats(output_tokens=5))}))
        print(len(text), flush=True)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
"""


class Process:
    """An API process that counts requests and is scraped."""

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

    def route(self, prefix: str) -> Any:
        """Count a request that is routed and moves, and return the summary of all processes."""
        return json.loads(self._ask(f"route {prefix}"))

    def scrape(self) -> Samples:
        length = int(self._ask("scrape"))
        assert self.process.stdout is not None
        return parsed(self.process.stdout.read(length))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
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
    bucket = value(samples, "syringa_request_prompt_tokens_bucket", model_name="qwen", le="+Inf")
    found: Any = value(samples, "syringa_requests_total", **ended)
    assert found == first == bucket
    return found


def test_summary_of_replicas_is_that_of_all_processes(tmp_path: Path, processes: list[Process]) -> None:
    processes += [Process(tmp_path, index) for index in range(3)]
    first, second, third = processes
    assert first.route("known") == {
        "moves": {"drain": 1}, "router": {"requests": 1, "hit_share": 1.0}
    }  # fmt: skip
    second.route("known")
    assert third.route("new") == {
        "moves": {"drain": 3}, "router": {"requests": 3, "hit_share": 0.6667}
    }  # fmt: skip


def test_summary_of_replicas_is_cached_and_has_no_share_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("syringa_")
    assert metrics.summarize_replicas()["router"] == {"requests": 0, "hit_share": None}
    metrics.count_route("qwen", known=True)
    metrics.count_move("qwen", "balance", same_fingerprint=False)
    monkeypatch.setattr(metrics, "_summary_until", 0.0)
    summary = metrics.summarize_replicas()
    assert summary["moves"]["balance"] == 1
    assert summary["router"] == {"requests": 1, "hit_share": 1.0}
    monkeypatch.setattr(metrics, "_summary_until", math.inf)
    assert metrics.summarize_replicas() is summary


def test_every_process_reports_sum_of_all(tmp_path: Path, processes: list[Process]) -> None:
    processes += [Process(tmp_path, 0), Process(tmp_path, 1)]
    first, second = processes
    first.count(3)
    second.count(4)
    for each in processes:
        found = each.scrape()
        assert total(found) == 7
        # Engine statistics are not added up.
        assert value(found, "syringa_generation_tokens_total", model_name="qwen") == 5
        assert not any("pid" in dict(labels) for _, labels in found)
    both = value(first.scrape(), "process_resident_memory_bytes")

    # A process is killed: its counts are kept, its memory is not reported.
    second.kill()
    files = sorted(each.name for each in tmp_path.iterdir())
    found = first.scrape()
    assert total(found) == 7
    one = value(found, "process_resident_memory_bytes")
    if both is not None:
        assert one is not None
        assert one < 0.75 * both

    # Another process replaces it and continues its files.
    processes.append(Process(tmp_path, 1))
    processes[-1].count(2)
    assert total(first.scrape()) == total(processes[-1].scrape()) == 9
    assert sorted(each.name for each in tmp_path.iterdir()) == files


def test_empty_file_does_not_break_scrape(tmp_path: Path, processes: list[Process]) -> None:
    """The file of a process that is just starting is empty."""
    processes.append(Process(tmp_path, 0))
    processes[0].count(1)
    (tmp_path / "counter_7.db").touch()
    assert total(processes[0].scrape()) == 1
