"""Windows of pools: local time, midnight, and both daylight-saving changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from syringa.fleet.schedule import Day, PoolSchedule, PoolWindow, find_zone, is_open, next_change

BERLIN = "Europe/Berlin"
WEEKDAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri")


def at(text: str, zone: str = BERLIN, *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def scheduled(*windows: PoolWindow, zone: str = BERLIN) -> PoolSchedule:
    return PoolSchedule(mode="scheduled", timezone=zone, windows=windows)


def open_intervals(schedule: PoolSchedule, begin: float, end: float) -> list[tuple[str, str]]:
    """The intervals in which a schedule is open, to the minute, in UTC."""
    minutes = [begin + 60 * number for number in range(int((end - begin) // 60) + 1)]
    states = [is_open(schedule, minute) for minute in minutes]
    edges = [minute for minute, (before, after) in zip(minutes[1:], pairwise(states), strict=True) if before != after]
    texts = [datetime.fromtimestamp(edge, UTC).strftime("%a %H:%M") for edge in edges]
    assert not states[0]
    assert not states[-1]
    return list(zip(texts[::2], texts[1::2], strict=True))


def test_window_on_some_days_is_open_between_its_times() -> None:
    office = scheduled(PoolWindow(days=WEEKDAYS, start="09:00", end="17:30"))
    for text, expected in (
        ("2026-01-30 08:59:59", False),  # a Friday
        ("2026-01-30 09:00:00", True),
        ("2026-01-30 17:29:59", True),
        ("2026-01-30 17:30:00", False),
        ("2026-01-31 12:00:00", False),
    ):
        assert is_open(office, at(text)) is expected


def test_window_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    nights = scheduled(PoolWindow(days=("fri",), start="22:00", end="06:00"))
    for text, expected in (
        ("2026-01-30 05:00", False),  # the morning of Friday is of the night of Thursday
        ("2026-01-30 21:59", False),
        ("2026-01-30 22:00", True),
        ("2026-01-31 00:00", True),
        ("2026-01-31 05:59", True),
        ("2026-01-31 06:00", False),
        ("2026-01-31 22:00", False),
    ):
        assert is_open(nights, at(text)) is expected


@pytest.mark.parametrize("end", ["24:00", "00:00"])
def test_window_may_end_at_midnight(end: str) -> None:
    evenings = scheduled(PoolWindow(days=("fri",), start="22:00", end=end))
    assert is_open(evenings, at("2026-01-30 23:59:59"))
    assert not is_open(evenings, at("2026-01-31 00:00"))


def test_window_without_times_is_open_all_day() -> None:
    weekend = scheduled(PoolWindow(days=("sat", "sun")))
    assert not is_open(weekend, at("2026-01-30 23:59:59"))
    assert is_open(weekend, at("2026-01-31 00:00"))
    assert is_open(weekend, at("2026-02-01 23:59:59"))
    assert not is_open(weekend, at("2026-02-02 00:00"))
    assert is_open(scheduled(PoolWindow()), at("2026-02-02 12:00"))
    assert is_open(PoolSchedule(mode="idle"), at("2026-02-02 12:00"))


def test_window_is_in_its_own_time_zone() -> None:
    nights = scheduled(PoolWindow(start="22:00", end="06:00"), zone="America/New_York")
    assert is_open(nights, at("2026-01-30 22:00", "America/New_York"))
    assert not is_open(nights, at("2026-01-30 22:00"))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        # On 2026-03-29 at 01:00 UTC, the clock jumps from 02:00 to 03:00.
        ("01:00", "04:00", ("Sun 00:00", "Sun 02:00")),  # two hours
        ("01:00", "02:30", ("Sun 00:00", "Sun 01:00")),  # ends when its end is skipped
        ("02:30", "04:00", ("Sun 01:00", "Sun 02:00")),  # begins when its beginning is skipped
    ],
)
def test_window_in_the_night_in_which_an_hour_is_skipped(start: str, end: str, expected: tuple[str, str]) -> None:
    nights = scheduled(PoolWindow(days=("sun",), start=start, end=end))
    assert open_intervals(nights, at("2026-03-28 12:00"), at("2026-03-29 12:00")) == [expected]


def test_window_that_is_skipped_is_not_open() -> None:
    skipped = scheduled(PoolWindow(start="02:10", end="02:50"))
    assert open_intervals(skipped, at("2026-03-29 00:00"), at("2026-03-29 12:00")) == []


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        # On 2026-10-25 at 01:00 UTC, the clock goes back from 03:00 to 02:00.
        ("01:00", "04:00", ("Sat 23:00", "Sun 03:00")),  # four hours
        ("01:00", "02:30", ("Sat 23:00", "Sun 00:30")),  # does not begin again when 02:00 comes again
        ("02:30", "04:00", ("Sun 00:30", "Sun 03:00")),  # does not end when 02:00 comes again
        ("02:00", "03:00", ("Sun 00:00", "Sun 02:00")),
    ],
)
def test_window_in_the_night_in_which_an_hour_comes_twice(start: str, end: str, expected: tuple[str, str]) -> None:
    nights = scheduled(PoolWindow(days=("sun",), start=start, end=end))
    assert open_intervals(nights, at("2026-10-24 12:00"), at("2026-10-25 12:00")) == [expected]


@pytest.mark.parametrize(("night", "hours"), [("2026-03-28", 7), ("2026-10-24", 9), ("2026-06-01", 8)])
def test_window_over_midnight_and_a_change_of_the_clock_ends_by_the_clock(night: str, hours: int) -> None:
    nights = scheduled(PoolWindow(start="22:00", end="06:00"))
    begins = at(f"{night} 22:00")
    ends = begins + 3600 * hours
    assert datetime.fromtimestamp(ends, ZoneInfo(BERLIN)).hour == 6
    assert is_open(nights, begins)
    assert is_open(nights, ends - 1)
    assert not is_open(nights, ends)
    assert next_change(nights, begins) == ends


def test_adjacent_windows_have_no_gap_at_any_change_of_the_clock() -> None:
    windows = scheduled(PoolWindow(start="00:00", end="02:30"), PoolWindow(start="02:30", end="24:00"))
    for day in ("2026-03-28", "2026-10-24"):
        minutes = (at(f"{day} 12:00") + 60 * number for number in range(24 * 60))
        assert all(is_open(windows, minute) for minute in minutes)


def test_next_change_is_when_the_schedule_opens_or_closes() -> None:
    nights = scheduled(PoolWindow(days=("fri",), start="22:00", end="06:00"))
    friday = at("2026-01-30 12:00")
    assert next_change(nights, friday) == at("2026-01-30 22:00")
    assert next_change(nights, at("2026-01-30 22:00")) == at("2026-01-31 06:00")
    assert next_change(nights, at("2026-01-31 06:00")) == at("2026-02-06 22:00")
    assert next_change(PoolSchedule(), friday) is None
    assert next_change(scheduled(PoolWindow()), friday) is None


def test_next_change_of_a_skipped_time_is_the_change_of_the_clock() -> None:
    early = scheduled(PoolWindow(start="02:30", end="04:00"))
    assert next_change(early, at("2026-03-29 01:00")) == at("2026-03-29 03:00")
    late = scheduled(PoolWindow(start="01:00", end="02:30"))
    assert next_change(late, at("2026-10-25 01:30")) == at("2026-10-25 02:30", fold=0)
    assert at("2026-10-25 02:30", fold=1) - at("2026-10-25 02:30", fold=0) == timedelta(hours=1).total_seconds()


def test_find_zone_refuses_what_is_no_time_zone() -> None:
    assert find_zone("UTC") is UTC
    assert find_zone(BERLIN) == ZoneInfo(BERLIN)
    for name in ("Europe/Berlim", "", "Europe", "../etc/passwd", "x" * 300):
        with pytest.raises(ValueError, match="unknown time zone"):
            find_zone(name)
