"""Prometheus metrics: requests, tokens and latencies of this server, and the statistics of its engines.

Names and labels are those of vLLM where it has the same metric: with `metrics_prefix` set to `vllm:`, its dashboards
work. Labels never contain client data: a model is a configured one, an endpoint one of a fixed set.

Each API process counts its own requests. With several, each counts in a file in a shared folder, and the process that
is scraped adds all of them up. A process that replaces another continues its file, so sums never shrink and the number
of files does not grow.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, disable_created_metrics, generate_latest
from prometheus_client import values as client_values
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from syringa.errors import ConfigError
from syringa.fleet.status import FleetStatus
from syringa.service.metrics.batch_metrics import batch_families
from syringa.service.metrics.engine_metrics import MODEL, EngineReport, engine_families
from syringa.service.metrics.fleet_metrics import fleet_families
from syringa.service.usage.accounting import RequestAccounting
from syringa.store.records import BatchCounts, Outcome
from syringa.version import installed_version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SUMMARY_SECONDS = 2.0  # for which the sums of `/status` are cached

_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_RATE_LIMITED = 429
# The finished reasons of vLLM. Refused requests never began: they are counted in `requests_total` only.
_FINISHED: dict[Outcome, str] = {"ok": "stop", "cancelled": "abort", "failed": "error"}
_CUT = "length"  # the reason of a successful request that reached its token limit

_WAITS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIMES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_DURATIONS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LOADS = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _WAITS),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a request, after the first.",
        _TOKEN_TIMES,
    ),
    "e2e_request_latency_seconds": ("Time from arrival to end, of successful requests.", _DURATIONS),
    "request_queue_time_seconds": ("Time in the engine's queue.", _DURATIONS),
    "request_prefill_time_seconds": ("Time to the first token, without queueing and model loading.", _DURATIONS),
    "request_decode_time_seconds": ("Time from a request's first token to its end.", _DURATIONS),
    "request_inference_time_seconds": ("Time to the end, without queueing and model loading.", _DURATIONS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
    "request_max_num_generation_tokens": ("Generated tokens of the longest choice of a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not in the prefix cache.", _TOKENS),
    "request_params_n": ("Choices that a request asks for, for each prompt.", _CHOICES),
    "request_params_max_tokens": ("Maximum output tokens of a request.", _TOKENS),
    "model_load_seconds": ("Time that a request waited for its model to be loaded.", _LOADS),
}

Observe = Callable[[float], None]


class _ModelSeries(NamedTuple):
    """The series of one model, cached because looking them up by label costs more than observing a value."""

    time_to_first_token_seconds: Observe
    request_time_per_output_token_seconds: Observe
    e2e_request_latency_seconds: Observe
    request_queue_time_seconds: Observe
    request_prefill_time_seconds: Observe
    request_decode_time_seconds: Observe
    request_inference_time_seconds: Observe
    request_prompt_tokens: Observe
    request_generation_tokens: Observe
    request_max_num_generation_tokens: Observe
    request_prefill_kv_computed_tokens: Observe
    request_params_n: Observe
    request_params_max_tokens: Observe
    model_load_seconds: Observe
    reasoning_tokens: Observe
    cached_tokens: Observe


class Metrics:
    """The metrics of one API process."""

    def __init__(
        self,
        prefix: str,
        folder: str | None = None,
        *,
        index: int = 0,
        before_render: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder`: shared by several processes, empty when the first starts; None for a single process.

        Each process has its own `index`, which the one that replaces it inherits. `before_render` may observe pending
        requests.
        """
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(
                f"metrics_prefix {prefix!r}: expected letters, digits, _ and :, and no digit at the beginning",
                param="metrics_prefix",
            )
        self._prefix, self._folder = prefix, folder
        self._registry = CollectorRegistry()
        disable_created_metrics()  # they would double the number of series
        # Set explicitly: the default depends on an environment variable that may be meant for another program.
        client_values.ValueClass = client_values.MutexValue if folder is None else _file_values(folder, index)
        labels = (MODEL, "endpoint", "outcome", "status")
        self._requests = self._counter("requests", "Requests by outcome.", *labels)
        self._finished = self._counter("request_success", "Finished requests by reason.", MODEL, "finished_reason")
        self._rate_limited = self._counter("rate_limited", "Requests refused by a rate limit.", "endpoint")
        self._reasoning = self._counter("reasoning_tokens", "Generated reasoning tokens.", MODEL)
        self._moves = self._counter(
            "request_moves", "Requests that went on at another replica.", MODEL, "reason", "fingerprint"
        )
        self._routed = self._counter(
            "router_requests", "Requests for which one of several replicas was chosen.", MODEL, "prefix"
        )
        self._lines = self._counter("batch_lines", "Requests of batches that have ended, by state.", "state")
        self._cached = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.", MODEL)
        self._histograms = {name: self._histogram(name, *about) for name, about in _HISTOGRAMS.items()}
        self._before_render = before_render
        self._series: dict[str, _ModelSeries] = {}
        self._routes: dict[tuple[str, bool], Callable[[], None]] = {}
        self._summary: dict[str, dict[str, Any]] = {}
        self._summary_until = -math.inf
        self._counters: dict[tuple[str, str, Outcome, int, bool], Callable[[], None]] = {}

    def observe(self, accounting: RequestAccounting) -> None:
        """Count a request that has ended."""
        truncated = accounting.stats.truncated
        labels = (accounting.model, accounting.endpoint, accounting.outcome, accounting.status, truncated)
        count = self._counters.get(labels)
        if count is None:
            count = self._counters[labels] = self._counter_of(*labels)
        count()
        series = self._series.get(accounting.model)
        if series is None:
            if not accounting.model:
                return
            series = self._series[accounting.model] = self._series_of(accounting.model)
        if accounting.load_seconds > 0:
            series.model_load_seconds(accounting.load_seconds)
        if accounting.first_token_seconds is not None:
            _observe(series, accounting, accounting.first_token_seconds)
        elif accounting.stats.prompt_tokens:
            _observe_embedding(series, accounting)

    def count_refused(self, endpoint: str, status: int) -> None:
        """Count a request that was rejected before its accounting began, because its API key is unknown."""
        self._requests.labels("", endpoint, "refused", status).inc()

    def count_move(self, model: str, reason: str, same_fingerprint: bool) -> None:
        """Count a request that went on at another replica; without `same_fingerprint`, its outputs may differ."""
        self._moves.labels(model, reason, "same" if same_fingerprint else "other").inc()

    def count_route(self, model: str, known: bool) -> None:
        """Count a request for which a replica was chosen; `known`: one had served a prefix of its prompt."""
        count = self._routes.get((model, known))
        if count is None:
            count = self._routes[model, known] = self._routed.labels(model, "known" if known else "new").inc
        count()

    def summarize_replicas(self) -> dict[str, dict[str, Any]]:
        """Return the moves of requests by reason and the router's hit share, of all API processes.

        Cached for `SUMMARY_SECONDS`.
        """
        now = time.monotonic()
        if now >= self._summary_until:
            self._summary_until, self._summary = now + SUMMARY_SECONDS, self._summarize_replicas()
        return self._summary

    def _summarize_replicas(self) -> dict[str, dict[str, Any]]:
        moves: dict[str, int] = {}
        routes = {"known": 0, "new": 0}
        wanted = {f"{self._prefix}request_moves_total": ("reason", moves)}
        wanted[f"{self._prefix}router_requests_total"] = ("prefix", routes)
        for family in self._collect("counter_*.db"):
            for sample in family.samples:
                if sample.name in wanted:
                    label, counts = wanted[sample.name]
                    counts[sample.labels[label]] = counts.get(sample.labels[label], 0) + int(sample.value)
        requests = sum(routes.values())
        share = round(routes["known"] / requests, 4) if requests else None
        return {"moves": moves, "router": {"requests": requests, "hit_share": share}}

    def count_line(self, *, failed: bool) -> None:
        """Count a request of a batch that has ended."""
        self._lines.labels("failed" if failed else "completed").inc()

    async def render(
        self,
        engines: Mapping[str, EngineReport],
        fleet: FleetStatus | None = None,
        batches: Sequence[BatchCounts] = (),
    ) -> bytes:
        """Return the exposition text. `engines`: by model. `batches`: those that are not finished."""
        self._before_render()
        fleet = FleetStatus() if fleet is None else fleet
        return await asyncio.to_thread(self._text, dict(engines), fleet, batches)

    def render_public(self, engines: Mapping[str, EngineReport]) -> bytes:
        """Return the exposition text of what tells nothing about other organizations: the state of models, the version.

        The statistics of engines are left out.
        """
        reports = {model: report._replace(stats=None) for model, report in engines.items()}
        families = [*engine_families(self._prefix, reports), self._build_info()]
        return generate_latest(_Families([family for family in families if family.samples]))

    def _counter_of(self, model: str, endpoint: str, outcome: Outcome, status: int, cut: bool) -> Callable[[], None]:
        """Return a function that counts a request with these labels."""
        counters = [self._requests.labels(model, endpoint, outcome, status)]
        if model and outcome in _FINISHED:
            counters.append(self._finished.labels(model, _CUT if cut and outcome == "ok" else _FINISHED[outcome]))
        if status == _RATE_LIMITED:
            counters.append(self._rate_limited.labels(endpoint))
        increments = [counter.inc for counter in counters]

        def count() -> None:
            for increment in increments:
                increment()

        return count

    def _series_of(self, model: str) -> _ModelSeries:
        series: dict[str, Observe] = {name: each.labels(model).observe for name, each in self._histograms.items()}
        return _ModelSeries(
            reasoning_tokens=self._reasoning.labels(model).inc, cached_tokens=self._cached.labels(model).inc, **series
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(self._prefix + name, about, (MODEL,), buckets=buckets, registry=self._registry)

    def _text(
        self, engines: Mapping[str, EngineReport], fleet: FleetStatus, batches: Sequence[BatchCounts] = ()
    ) -> bytes:
        """Runs in a thread, since it takes milliseconds with many models."""
        families = sorted(self._collect(), key=lambda family: family.name)
        families += engine_families(self._prefix, engines)
        families += fleet_families(self._prefix, fleet)
        families += batch_families(self._prefix, batches)
        families.append(self._build_info())
        if memory := sum(_resident_bytes(pid) for pid in self._processes()):
            about = "Resident memory of all API processes."
            families.append(GaugeMetricFamily("process_resident_memory_bytes", about, memory))
        return generate_latest(_Families(families))

    def _build_info(self) -> Metric:
        build = GaugeMetricFamily(f"{self._prefix}build_info", "The version of Syringa.", labels=("version",))
        build.add_metric((installed_version(),), 1)
        return build

    def _collect(self, pattern: str = "*.db") -> Iterable[Metric]:
        """`pattern`: of the names of the files that are read, where several processes have some."""
        if self._folder is None:
            return self._registry.collect()
        # A new file is empty for a moment.
        files = [str(file) for file in Path(self._folder).glob(pattern) if file.stat().st_size]
        found: Iterable[Metric] = MultiProcessCollector.merge(files)
        return found

    def _processes(self) -> list[int]:
        if self._folder is None:
            return [os.getpid()]
        return [int(file.read_text() or 0) for file in Path(self._folder).glob("*.pid")]


def _observe(series: _ModelSeries, accounting: RequestAccounting, first: float) -> None:
    """Observe the times and tokens of a request with at least one token."""
    stats = accounting.stats
    decode = accounting.total_seconds - first
    series.time_to_first_token_seconds(first)
    series.request_queue_time_seconds(stats.queue_seconds)
    prefill = max(0.0, first - stats.queue_seconds - accounting.load_seconds)
    series.request_prefill_time_seconds(prefill)
    series.request_decode_time_seconds(decode)
    series.request_inference_time_seconds(prefill + decode)
    series.request_prompt_tokens(stats.prompt_tokens)
    series.request_generation_tokens(stats.completion_tokens)
    series.request_max_num_generation_tokens(stats.longest_choice)
    series.request_prefill_kv_computed_tokens(stats.prompt_tokens - stats.cached_tokens)
    series.request_params_n(accounting.choices)
    series.request_params_max_tokens(accounting.max_tokens)
    if stats.completion_tokens > 1:
        series.request_time_per_output_token_seconds(decode / (stats.completion_tokens - 1))
    if accounting.outcome == "ok":
        series.e2e_request_latency_seconds(accounting.total_seconds)
    if stats.reasoning_tokens:
        series.reasoning_tokens(stats.reasoning_tokens)
    if stats.cached_tokens:
        series.cached_tokens(stats.cached_tokens)


def _observe_embedding(series: _ModelSeries, accounting: RequestAccounting) -> None:
    """Observe the times and tokens of a request that was computed and generates no tokens."""
    stats = accounting.stats
    series.request_queue_time_seconds(stats.queue_seconds)
    waited = stats.queue_seconds + accounting.load_seconds
    series.request_inference_time_seconds(max(0.0, accounting.total_seconds - waited))
    series.request_prompt_tokens(stats.prompt_tokens)
    series.e2e_request_latency_seconds(accounting.total_seconds)


class _Families(Collector):
    """A collector of metrics that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _file_values(folder: str, index: int) -> type:
    """Return the class of values kept in this process's files.

    Files are named by index, not by process id, so that a process continues those of the one it replaces.
    """
    os.environ[_FOLDER_VARIABLE] = folder
    Path(folder, f"{index}.pid").write_text(str(os.getpid()))
    kind: type = client_values.MultiProcessValue(process_identifier=lambda: index)
    return kind


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process; 0 if it has exited, even if its id belongs to an unrelated process now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    parent, pages = int(fields[1]), int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") if pid == os.getpid() or parent == os.getppid() else 0
