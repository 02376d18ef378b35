from __future__ import annotations

import random
from typing import Any

import pytest

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.events import GenerationStats
from syringa.service.auth.keys import Caller
from syringa.service.series.figures import Figures, decode_figures, encode_figures, error_kind, percentile
from syringa.service.usage.accounting import RequestAccounting
from syringa.types import EngineStats


def accounting(
    *, prompt: int = 10, cached: int = 4, output: int = 5, first: float | None = 0.5, total: float = 1.5, **more: Any
) -> RequestAccounting:
    """Return the accounting of a request that has ended."""
    request = RequestAccounting([], Caller(), "/v1/completions", "id")
    request.stats = GenerationStats()
    stats = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": output}
    for name, value in stats.items():
        setattr(request.stats, name, value)
    request.model, request.first_token_seconds, request.total_seconds = "m", first, total
    for name, value in more.items():
        setattr(request, name, value)
    return request


def test_request_counts_with_its_tokens_and_times() -> None:
    figures = Figures()
    figures.observe(accounting())
    assert (figures.requests, figures.ok, figures.errors) == (1, 1, {})
    assert (figures.input_tokens, figures.cached_tokens, figures.output_tokens) == (10, 4, 5)
    assert percentile(figures.ttft, 0.5) == pytest.approx(0.5, rel=0.05)
    assert percentile(figures.tpot, 0.5) == pytest.approx(0.25, rel=0.05)
    assert percentile(figures.latency, 0.5) == pytest.approx(1.5, rel=0.05)


def test_failed_requests_count_by_kind_and_have_no_latency() -> None:
    figures = Figures()
    for error in (InvalidRequest("x"), EngineOverloaded("x"), RuntimeError("x")):
        request = accounting(first=None, output=0)
        request.fail(error)
        figures.observe(request)
    request = accounting()
    request.cancel()
    figures.observe(request)
    assert (figures.ok, figures.refused, figures.failed, figures.cancelled) == (0, 1, 2, 1)
    assert figures.errors == {"invalid_request": 1, "overloaded": 1, "server_error": 1, "cancelled": 1}
    assert figures.latency == {}
    assert sum(figures.ttft.values()) == 1  # the first token of the cancelled one came


def test_single_token_has_no_time_per_token() -> None:
    figures = Figures()
    figures.observe(accounting(output=1))
    assert figures.tpot == {}


def test_line_of_a_batch_has_no_latency() -> None:
    figures = Figures()
    figures.observe(accounting(background=True, first=None))
    assert (figures.ok, figures.latency, figures.ttft) == (1, {}, {})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request"),
        (415, "invalid_request"),
        (429, "rate_limited"),
        (500, "server_error"),
        (499, "cancelled"),
    ],
)
def test_error_kind_follows_from_the_status(status: int, kind: str) -> None:
    assert error_kind(status) == kind


def test_percentiles_of_a_histogram_are_exact_to_five_percent() -> None:
    draw = random.Random(1)
    times = [draw.lognormvariate(-2, 1.5) for _ in range(5000)]
    figures = Figures()
    for each in times:
        figures.observe(accounting(first=each, total=each))
    times.sort()
    for share in (0.1, 0.5, 0.9, 0.99):
        assert percentile(figures.ttft, share) == pytest.approx(times[int(share * len(times))], rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e6])
def test_extreme_times_are_counted(seconds: float) -> None:
    figures = Figures()
    figures.observe(accounting(first=seconds, total=seconds))
    assert sum(figures.ttft.values()) == 1
    assert percentile(figures.ttft, 1.0) is not None


def test_percentile_without_observations_is_unknown() -> None:
    assert percentile({}, 0.5) is None


def test_engines_are_integrated_over_time() -> None:
    figures = Figures()
    block = {"blocks_total": 10, "blocks_free": 4, "blocks_cached": 2, "block_size": 16}
    before = EngineStats(output_tokens=100, prompt_tokens=50)
    figures.sample(EngineStats(running=2, waiting=1, output_tokens=160, prompt_tokens=80, **block), before, 5)
    figures.sample(
        EngineStats(running=4, output_tokens=10, prompt_tokens=5, **block), EngineStats(output_tokens=160), 5
    )
    assert (figures.generated_tokens, figures.prompt_tokens) == (70, 35)  # the counters have begun anew
    assert (figures.running_seconds, figures.waiting_seconds) == (30, 5)
    assert (figures.running_max, figures.waiting_max) == (4, 1)
    assert (figures.kv_used_seconds, figures.kv_total_seconds) == (4 * 16 * 10, 10 * 16 * 10)
    assert not figures.is_idle


def test_loaded_model_without_requests_is_idle() -> None:
    figures = Figures()
    figures.sample(EngineStats(blocks_total=10, blocks_free=10, block_size=16), EngineStats(), 5)
    assert figures.is_idle


def test_figures_add_up() -> None:
    one, other = Figures(), Figures()
    one.observe(accounting())
    other.observe(accounting(first=2.0, total=4.0))
    other.count_error(429)
    one.running_max, other.running_max, one.running_seconds, other.running_seconds = 3, 2, 10.0, 20.0
    parallel, later = decode_figures(encode_figures(one)), decode_figures(encode_figures(one))
    assert parallel == one
    parallel.add(other, simultaneous=True)
    later.add(other, simultaneous=False)
    assert (parallel.running_max, later.running_max) == (5, 3)
    for each in (parallel, later):
        assert (each.ok, each.input_tokens, each.running_seconds, each.errors) == (2, 20, 30.0, {"rate_limited": 1})
        assert sum(each.ttft.values()) == 2


def test_malformed_figures_count_nothing() -> None:
    assert decode_figures("{") == decode_figures('{"ok": "x"}') == Figures()
