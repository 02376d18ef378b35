from __future__ import annotations

import pytest

from syringa.errors import InvalidRequest
from syringa.service.series.figures import Figures, encode_figures
from syringa.service.series.report import DEFAULT_POINTS, TimeRange, plan_range, report
from syringa.store import SeriesRow
from tests.service.series.test_figures import accounting

NOW = 1_700_000_107.0
MINUTE, HOUR, DAY = 60, 3600, 86_400


def row(start: int, figures: Figures, *, model: str = "m", source: str = "a", resolution: int = 10) -> SeriesRow:
    return SeriesRow(resolution, start, model, source, encode_figures(figures))


def counted(requests: int = 1, **values: float) -> Figures:
    figures = Figures(**values)
    for _ in range(requests):
        figures.observe(accounting())
    return figures


@pytest.mark.parametrize(
    ("seconds", "step"),
    [
        (MINUTE, 10),
        (5 * MINUTE, 10),
        (15 * MINUTE, 10),
        (HOUR, 30),
        (6 * HOUR, 180),
        (DAY, 900),
        (2 * DAY, 1800),
        (7 * DAY, 7200),
        (30 * DAY, 21_600),
    ],
)
def test_default_step_gives_a_chart_of_moderate_width(seconds: int, step: int) -> None:
    span = plan_range(NOW, seconds)
    assert span.step == step
    assert span.start % step == 0
    assert span.start <= NOW - seconds < span.start + step + 20
    assert len(span.times) <= DEFAULT_POINTS + 1
    assert NOW - 20 < span.end <= NOW - 6


@pytest.mark.parametrize(
    ("seconds", "step", "param"),
    [
        (59, None, "range"),
        (30 * DAY + 1, None, "range"),
        (300, 15, "step"),
        (300, 0, "step"),
        (3 * HOUR, 10, "step"),  # kept by the minute
        (3 * DAY, 60, "step"),  # kept by the quarter of an hour
        (7200 - 60, 5, "step"),
    ],
)
def test_range_or_step_that_is_not_kept_is_refused(seconds: int, step: int | None, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        plan_range(NOW, seconds, step)
    assert raised.value.param == param


def test_range_may_end_in_the_past_but_not_in_the_future() -> None:
    assert plan_range(NOW, 300, until=int(NOW) - 1000).end == 1_699_999_100
    assert plan_range(NOW, 300, until=int(NOW) + 1000) == plan_range(NOW, 300)
    assert plan_range(NOW, 300, until=int(NOW) - 10 * DAY).step == 900  # not kept by ten seconds any more


def test_every_series_has_a_value_for_each_step() -> None:
    span = TimeRange(1000, 1055, 20)
    found = report([row(1000, counted()), row(1010, counted(2)), row(1040, counted(3), model="n")], span)
    assert found["times"] == [1000, 1020, 1040]
    assert [each["id"] for each in found["models"]] == ["m", "n"]
    for each in (*found["models"], found["all"]):
        for name, values in each.items():
            if name not in ("id", "totals", "errors"):
                assert len(values) == 3, name
        assert each["totals"].keys() == each.keys() - {"id", "totals"}
    assert found["models"][0]["requests"] == [3, 0, 0]
    assert found["all"]["requests"] == [3, 0, 3]
    assert found["all"]["totals"]["requests"] == 6
    assert found["all"]["ttft_p50"][1] is None
    assert found["all"]["cache_hit_share"] == [0.4, None, 0.4]


def test_rates_of_the_last_step_refer_to_the_time_that_is_over() -> None:
    figures = Figures(generated_tokens=600, running_seconds=30.0)
    found = report([row(1000, figures), row(1060, figures)], TimeRange(1000, 1080, 60))["all"]
    assert found["tokens_per_second"] == [10.0, 30.0]
    assert found["running"] == [0.5, 1.5]
    assert found["totals"]["tokens_per_second"] == 15.0


def test_maxima_add_up_over_processes_and_models_but_not_over_time() -> None:
    rows = [
        row(1000, Figures(running_max=2)),
        row(1000, Figures(running_max=3), source="b"),
        row(1010, Figures(running_max=4)),
        row(1000, Figures(running_max=10), model="n"),
    ]
    found = report(rows, TimeRange(1000, 1020, 20))
    assert found["models"][0]["running_max"] == [5]
    assert found["all"]["running_max"] == [15]


def test_errors_have_the_kinds_that_occur() -> None:
    one, other = Figures(), Figures()
    one.count_error(429)
    other.count_error(500)
    found = report([row(1000, one), row(1010, other, model="")], TimeRange(1000, 1020, 10))
    assert found["all"]["errors"] == {"rate_limited": [1, 0], "server_error": [0, 1]}
    assert found["all"]["totals"]["errors"] == {"rate_limited": 1, "server_error": 1}
    assert [each["id"] for each in found["models"]] == ["m"]
    assert found["models"][0]["errors"] == {"rate_limited": [1, 0]}


def test_empty_range_has_no_models() -> None:
    found = report([], plan_range(NOW, 300))
    assert found["models"] == []
    assert set(found["all"]["requests"]) == {0}
    assert found["all"]["totals"]["ttft_p99"] is None
