"""`/metrics`: what requests cost and how they ended, and what the engines say of themselves, for Prometheus.

Suffixes and labels are vLLM's where vLLM has the same thing, so that its dashboards work where `metrics_prefix` is
`vllm:`. No label comes from what a client wrote: a model is one that was configured, an endpoint is one of ours.

Requests are counted by the process that answered them. Where there are several, each counts in a file of its own, in a
folder that they share, and whichever of them is asked adds up all. A process that dies leaves its file to the one that
takes its place, so sums never shrink and files never become more. Nothing is kept there that ends with a process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, disable_created_metrics, generate_latest
from prometheus_client import values as client_values
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from syringa.errors import ConfigError
from syringa.service.metrics.engine_metrics import MODEL, engine_families
from syringa.service.usage.account import Account, Outcome
from syringa.types import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDPOINTS = frozenset(
    {
        "/v1/completions",
        "/api/v2/completions",
        "/v1/chat/completions",
        "/api/v2/chat/completions",
        "/v1/responses",
        "/v1/responses/compact",
    }
)

_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_RATE_LIMITED = 429
# How vLLM calls an end. What was refused never began, and is in `requests_total` alone.
_FINISHED: dict[Outcome, str] = {"ok": "stop", "cancelled": "abort", "failed": "error"}
_CUT = "length"  # the same for what went well and was cut

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
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _WAITS),
    "request_time_per_output_token_seconds": ("Mean time between a request's tokens after the first.", _TOKEN_TIMES),
    "e2e_request_latency_seconds": ("From the arrival to the end of requests that went well.", _DURATIONS),
    "request_queue_time_seconds": ("In the engine's queue.", _DURATIONS),
    "request_prefill_time_seconds": ("To the first token, without the queue and the loading of a model.", _DURATIONS),
    "request_decode_time_seconds": ("From a request's first token to its end.", _DURATIONS),
    "request_prompt_tokens": ("Tokens of a request's prompts.", _TOKENS),
    "request_generation_tokens": ("Tokens that a request generated.", _TOKENS),
    "model_load_seconds": ("What requests waited for their model to be loaded.", _LOADS),
}
_TOKEN_TIME = "request_time_per_output_token_seconds"
# What older and newer dashboards call it. Theirs count tokens; here a request counts once, with its mean.
_TOKEN_TIME_ALIASES = ("time_per_output_token_seconds", "inter_token_latency_seconds")

Add = Callable[[float], None]


class _Series(NamedTuple):
    """One model's series. Looking them up by their labels for every request would cost more than counting does."""

    time_to_first_token_seconds: Add
    request_time_per_output_token_seconds: Add
    e2e_request_latency_seconds: Add
    request_queue_time_seconds: Add
    request_prefill_time_seconds: Add
    request_decode_time_seconds: Add
    request_prompt_tokens: Add
    request_generation_tokens: Add
    model_load_seconds: Add
    reasoning_tokens: Add
    cached_tokens: Add


class Metrics:
    """One for each API process. Called with the account of each request that has ended."""

    def __init__(self, prefix: str, folder: str | None = None, *, index: int = 0) -> None:
        """`folder`: what several processes share, made for them alone and empty when the first begins; None: there is
        one process. Each has an `index` of its own, and one that takes another's place takes its index too."""
        if not _PREFIX.fullmatch(prefix):
            said = f"metrics_prefix {prefix!r}: expected letters, digits, _ and :, and no digit at the beginning"
            raise ConfigError(said, param="metrics_prefix")
        self._prefix, self._folder = prefix, folder
        self._registry = CollectorRegistry()
        disable_created_metrics()  # a series more for each, that nobody looks at
        # Always said: by default a variable decides, which may have been set for another program.
        client_values.ValueClass = client_values.MutexValue if folder is None else _files(folder, index)
        ended = (MODEL, "endpoint", "outcome", "status")
        self._requests = self._counter("requests", "Requests by how they ended.", *ended)
        self._finished = self._counter("request_success", "Requests by why they finished.", MODEL, "finished_reason")
        self._refused = self._counter("rate_limited", "Requests that a limit refused.", "endpoint")
        self._reasoning = self._counter("reasoning_tokens", "Generated tokens that were thought.", MODEL)
        self._cached = self._counter("cached_tokens", "Prompt tokens of requests that came from the cache.", MODEL)
        self._histograms = {name: self._histogram(name, *about) for name, about in _HISTOGRAMS.items()}
        self.settle: Callable[[], None] = lambda: None  # called before anything is shown: some may not be counted yet
        self._series: dict[str, _Series] = {}
        self._ends: dict[tuple[str, str, Outcome, int, bool], Callable[[], None]] = {}

    def __call__(self, account: Account) -> None:
        """Counts a request that has ended."""
        endpoint = account.endpoint if account.endpoint in ENDPOINTS else ""
        end = (account.model, endpoint, account.outcome, account.status, account.trace.cut)
        count = self._ends.get(end)
        if count is None:
            count = self._ends[end] = self._counting(*end)
        count()
        series = self._series.get(account.model)
        if series is None:
            if not account.model:
                return
            series = self._series[account.model] = self._of(account.model)
        if account.load_seconds > 0:
            series.model_load_seconds(account.load_seconds)
        if account.first_token_seconds is not None:
            _observe(series, account, account.first_token_seconds)

    def turn_away(self, path: str, status: int) -> None:
        """Counts a request that has no account, because nobody knows its key."""
        if path in ENDPOINTS:
            self._requests.labels("", path, "refused", status).inc()

    async def render(self, stats: Mapping[str, EngineStats | None]) -> bytes:
        """The text for Prometheus. `stats`: what the engine of each model says; None: the model is not loaded."""
        self.settle()
        return await asyncio.to_thread(self._text, dict(stats))

    def _counting(self, model: str, endpoint: str, outcome: Outcome, status: int, cut: bool) -> Callable[[], None]:
        """What counts an end like this one."""
        counters = [self._requests.labels(model, endpoint, outcome, status)]
        if model and outcome in _FINISHED:
            counters.append(self._finished.labels(model, _CUT if cut and outcome == "ok" else _FINISHED[outcome]))
        if status == _RATE_LIMITED:
            counters.append(self._refused.labels(endpoint))
        steps = [counter.inc for counter in counters]

        def count() -> None:
            for step in steps:
                step()

        return count

    def _of(self, model: str) -> _Series:
        series: dict[str, Add] = {name: each.labels(model).observe for name, each in self._histograms.items()}
        return _Series(
            reasoning_tokens=self._reasoning.labels(model).inc, cached_tokens=self._cached.labels(model).inc, **series
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(self._prefix + name, about, (MODEL,), buckets=buckets, registry=self._registry)

    def _text(self, stats: Mapping[str, EngineStats | None]) -> bytes:
        """Runs in a thread: with many models it takes milliseconds."""
        families = sorted(self._counted(), key=lambda family: family.name)
        times = [family for family in families if family.name == self._prefix + _TOKEN_TIME]
        families += [_renamed(family, self._prefix + name) for family in times for name in _TOKEN_TIME_ALIASES]
        families += engine_families(self._prefix, stats)
        build = GaugeMetricFamily(f"{self._prefix}build_info", "Which Syringa this is.", labels=("version",))
        build.add_metric((_version(),), 1)
        families.append(build)
        if memory := sum(_resident_bytes(pid) for pid in self._processes()):
            about = "Memory of the API processes together."
            families.append(GaugeMetricFamily("process_resident_memory_bytes", about, memory))
        return generate_latest(_Families(families))

    def _counted(self) -> Iterable[Metric]:
        if self._folder is None:
            return self._registry.collect()
        # One that has just been made is empty for a moment.
        files = [str(file) for file in Path(self._folder).glob("*.db") if file.stat().st_size]
        found: Iterable[Metric] = MultiProcessCollector.merge(files)
        return found

    def _processes(self) -> list[int]:
        if self._folder is None:
            return [os.getpid()]
        return [int(file.read_text() or 0) for file in Path(self._folder).glob("*.pid")]


def _observe(series: _Series, account: Account, first: float) -> None:
    """The times and tokens of a request that was begun."""
    trace = account.trace
    later = account.total_seconds - first
    series.time_to_first_token_seconds(first)
    series.request_queue_time_seconds(trace.queued)
    series.request_prefill_time_seconds(max(0.0, first - trace.queued - account.load_seconds))
    series.request_decode_time_seconds(later)
    series.request_prompt_tokens(trace.prompt_tokens)
    series.request_generation_tokens(trace.completion_tokens)
    if trace.completion_tokens > 1:
        series.request_time_per_output_token_seconds(later / (trace.completion_tokens - 1))
    if account.outcome == "ok":
        series.e2e_request_latency_seconds(account.total_seconds)
    if trace.reasoning_tokens:
        series.reasoning_tokens(trace.reasoning_tokens)
    if trace.cached_tokens:
        series.cached_tokens(trace.cached_tokens)


class _Families(Collector):
    """What is there already, for who wants to collect it."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _files(folder: str, index: int) -> type:
    """Values that are kept in this process's files. They are named by index and not by process id: what a process has
    counted is then continued by the one after it."""
    os.environ[_FOLDER_VARIABLE] = folder
    Path(folder, f"{index}.pid").write_text(str(os.getpid()))
    kind: type = client_values.MultiProcessValue(process_identifier=lambda: index)
    return kind


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return copy


def _resident_bytes(pid: int) -> int:
    """0 for a process that is gone, or none of ours: of those that have ended, the id may be somebody else's now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    parent, pages = int(fields[1]), int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") if pid == os.getpid() or parent == os.getppid() else 0


def _version() -> str:
    try:
        return importlib.metadata.version("syringa")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed
