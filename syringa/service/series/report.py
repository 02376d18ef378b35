"""Stored figures as series: one value for each step of a time range, by model and for all models together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from syringa.errors import InvalidRequest
from syringa.service.series.figures import Figures, percentile
from syringa.service.series.recorder import INTERVAL, KEEP_SECONDS, RESOLUTIONS, combine_sources
from syringa.store import SeriesRow

DEFAULT_RANGE = 300
SHORTEST_RANGE = 60
DEFAULT_POINTS, MAX_POINTS = 120, 1000
LAG_SECONDS = 6  # after the end of an interval, until every process has stored it

_STEPS = (10, 20, 30, 60, 120, 180, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600)
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_COUNTERS = (
    *("requests", "ok", "cancelled", "refused", "failed", "input_tokens", "cached_tokens", "output_tokens"),
    *("running_max", "waiting_max"),
)
_RATES = {
    "tokens_per_second": "generated_tokens",
    "prompt_tokens_per_second": "prompt_tokens",
    "running": "running_seconds",
    "waiting": "waiting_seconds",
}
_HISTOGRAMS = ("ttft", "tpot", "latency")

_Intervals = Mapping[tuple[int, int], Figures]  # by start and length


class TimeRange(NamedTuple):
    """A range of time, in steps. The last step may be shorter."""

    start: int
    end: int
    step: int

    @property
    def times(self) -> list[int]:
        return list(range(self.start, self.end, self.step))

    def seconds(self, time: int) -> int:
        """Return the length of the step that begins at `time`."""
        return min(self.step, self.end - time)


def plan_range(now: float, seconds: int | None = None, step: int | None = None, until: int | None = None) -> TimeRange:
    """Return a range that ends now, or at `until`. Raises `InvalidRequest`.

    Without `step`, it has at most `DEFAULT_POINTS` steps.
    """
    seconds = DEFAULT_RANGE if seconds is None else seconds
    if not SHORTEST_RANGE <= seconds <= KEEP_SECONDS:
        raise InvalidRequest("range: expected 1m to 30d.", param="range")
    latest = int(now - LAG_SECONDS) // INTERVAL * INTERVAL
    end = latest if until is None else min(latest, until // INTERVAL * INTERVAL)
    oldest = now - (end - seconds)  # the age of the first step
    finest = next((resolution for resolution, age in RESOLUTIONS if oldest <= age), RESOLUTIONS[-1][0])
    if step is None:
        step = next(each for each in _STEPS if each % finest == 0 and seconds / each <= DEFAULT_POINTS)
    elif step % finest or not step:
        raise InvalidRequest(
            f"step: expected a multiple of {finest} seconds, which is what is kept of that time.", param="step"
        )
    elif seconds / step > MAX_POINTS:
        raise InvalidRequest(f"step: expected one with at most {MAX_POINTS} steps in the range.", param="step")
    start = (end - seconds) // step * step
    return TimeRange(start, max(end, start + INTERVAL), step)


def report(rows: Sequence[SeriesRow], range: TimeRange) -> dict[str, Any]:
    """Return the series of each model that has any, and of all models together."""
    by_model: dict[str, list[SeriesRow]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    models = {model: combine_sources(found) for model, found in sorted(by_model.items())}
    together = models if len(models) == 1 else {"": _combine_models(models.values())}
    return {
        "start": range.start,
        "end": range.end,
        "range_seconds": range.end - range.start,
        "step_seconds": range.step,
        "times": range.times,
        "models": [{"id": model, **_series(found, range)} for model, found in models.items() if model],
        "all": _series(next(iter(together.values()), {}), range),
    }


def _combine_models(models: Iterable[_Intervals]) -> _Intervals:
    combined: dict[tuple[int, int], Figures] = {}
    for intervals in models:
        for key, figures in intervals.items():
            combined.setdefault(key, Figures()).add(figures, simultaneous=True)
    return combined


def _series(intervals: _Intervals, range: TimeRange) -> dict[str, Any]:
    steps: dict[int, Figures] = {}
    for (start, _), figures in intervals.items():
        steps.setdefault((start - range.start) // range.step, Figures()).add(figures, simultaneous=False)
    total = Figures()
    for figures in steps.values():
        total.add(figures, simultaneous=False)
    points = [_values(steps.get(index) or Figures(), range.seconds(time)) for index, time in enumerate(range.times)]
    series: dict[str, Any] = {name: [point[name] for point in points] for name in points[0]}
    series["errors"] = {
        kind: [steps[index].errors.get(kind, 0) if index in steps else 0 for index, _ in enumerate(points)]
        for kind in sorted(total.errors)
    }
    return {"totals": _values(total, range.end - range.start) | {"errors": total.errors}, **series}


def _values(figures: Figures, seconds: int) -> dict[str, Any]:
    """Return the values of an interval of so many seconds. Those without anything to compute them from are None."""
    values: dict[str, Any] = {name: getattr(figures, name) for name in _COUNTERS}
    values |= {name: round(getattr(figures, source) / seconds, 3) for name, source in _RATES.items()}
    values["kv_usage"] = _share(figures.kv_used_seconds, figures.kv_total_seconds) or 0.0
    values["cache_hit_share"] = _share(figures.cached_tokens, figures.input_tokens)
    for name in _HISTOGRAMS:
        for label, share in _SHARES.items():
            found = percentile(getattr(figures, name), share)
            values[f"{name}_{label}"] = None if found is None else round(found, 6)
    return values


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
