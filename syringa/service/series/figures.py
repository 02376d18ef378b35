"""Figures of a model in an interval: requests, tokens, latencies and the load of its engines.

Figures of several processes, and of several intervals, can be added up: latencies are histograms, and gauges are
integrals over time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from syringa.service.usage.accounting import CANCELLED, RequestAccounting
from syringa.types import EngineStats

_SMALLEST = 1e-4  # seconds; shorter times are counted in the first bucket
_PER_OCTAVE = 8  # buckets in each doubling: percentiles are exact to 5 percent

_ERROR_KINDS = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    413: "too_large",
    424: "failed_dependency",
    429: "rate_limited",
    CANCELLED: "cancelled",
    503: "overloaded",
    504: "timeout",
}

Histogram = dict[int, int]
"""The number of observations in each bucket that has any."""


class Figures(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The figures of one interval. Requests are counted in the interval in which they end."""

    ok: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    errors: dict[str, int] = msgspec.field(default_factory=dict)  # by kind
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram = msgspec.field(default_factory=dict)  # time to first token
    tpot: Histogram = msgspec.field(default_factory=dict)  # mean time per output token after the first
    latency: Histogram = msgspec.field(default_factory=dict)  # of successful requests

    # Of the engines
    prompt_tokens: int = 0  # processed in the interval
    generated_tokens: int = 0
    running_seconds: float = 0.0  # the integral of the number of running sequences
    waiting_seconds: float = 0.0
    running_max: int = 0
    waiting_max: int = 0
    kv_used_seconds: float = 0.0  # the integral of the number of tokens in the KV cache
    kv_total_seconds: float = 0.0

    @property
    def requests(self) -> int:
        return self.ok + self.cancelled + self.refused + self.failed

    def observe(self, accounting: RequestAccounting) -> None:
        """Count a request that has ended."""
        stats, outcome, first = accounting.stats, accounting.outcome, accounting.first_token_seconds
        setattr(self, outcome, getattr(self, outcome) + 1)
        if outcome != "ok":
            self.count_error(accounting.status)
        self.input_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.output_tokens += stats.completion_tokens
        if first is not None:
            _count(self.ttft, first)
            if stats.completion_tokens > 1:
                _count(self.tpot, (accounting.total_seconds - first) / (stats.completion_tokens - 1))
        if outcome == "ok" and not accounting.background:
            _count(self.latency, accounting.total_seconds)

    def count_error(self, status: int) -> None:
        kind = error_kind(status)
        self.errors[kind] = self.errors.get(kind, 0) + 1

    def sample(self, stats: EngineStats, before: EngineStats, seconds: float) -> None:
        """Add the state of a model's engines, which stands for so many seconds. `before`: the sample before it."""
        self.prompt_tokens += _increase(before.prompt_tokens, stats.prompt_tokens)
        self.generated_tokens += _increase(before.output_tokens, stats.output_tokens)
        self.running_seconds += stats.running * seconds
        self.waiting_seconds += stats.waiting * seconds
        self.running_max = max(self.running_max, stats.running)
        self.waiting_max = max(self.waiting_max, stats.waiting)
        used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        self.kv_used_seconds += used * stats.block_size * seconds
        self.kv_total_seconds += stats.blocks_total * stats.block_size * seconds

    @property
    def is_idle(self) -> bool:
        """Whether nothing has happened, apart from memory that was kept."""
        engine = (self.generated_tokens, self.prompt_tokens, self.running_max, self.waiting_max, self.kv_used_seconds)
        return not (self.requests or self.errors or any(engine))

    def add(self, other: Figures, *, simultaneous: bool) -> None:
        """Add the figures of the same interval of another process, or those of another interval."""
        for name in _SUMS:
            if value := getattr(other, name):
                setattr(self, name, getattr(self, name) + value)
        for name in _MAXIMA:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, mine + theirs if simultaneous else max(mine, theirs))
        for name in _COUNTS:
            counts = getattr(self, name)
            for key, count in getattr(other, name).items():
                counts[key] = counts.get(key, 0) + count


_MAXIMA = ("running_max", "waiting_max")
_COUNTS = ("errors", "ttft", "tpot", "latency")
_SUMS = tuple(name for name in Figures.__struct_fields__ if name not in (*_MAXIMA, *_COUNTS))

_decode = msgspec.json.Decoder(Figures).decode


def encode_figures(figures: Figures) -> str:
    return msgspec.json.encode(figures).decode()


def decode_figures(text: str) -> Figures:
    """Return stored figures; none if they are malformed."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return Figures()


def error_kind(status: int) -> str:
    """Return the kind of an error, by its HTTP status."""
    return _ERROR_KINDS.get(status) or ("invalid_request" if status < 500 else "server_error")


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """Return the time that this share of observations does not exceed, in seconds; None without observations."""
    total = sum(histogram.values())
    if not total:
        return None
    wanted, seen = share * total, 0
    for bucket in sorted(histogram):
        count = histogram[bucket]
        if seen + count >= wanted:
            return float(_SMALLEST * 2 ** ((bucket + max(0.0, wanted - seen) / count) / _PER_OCTAVE))
        seen += count
    raise AssertionError("a share is at most 1")


def _increase(before: int, now: int) -> int:
    """Return by how much a counter has grown, which begins at 0 again when a model is loaded again."""
    return now - before if now >= before else now


def _count(histogram: Histogram, seconds: float) -> None:
    bucket = int(math.log2(seconds / _SMALLEST) * _PER_OCTAVE) if seconds > _SMALLEST else 0
    histogram[bucket] = histogram.get(bucket, 0) + 1
