"""When a pool is open: windows of local time, which may cross midnight, correct over daylight-saving changes.

A window begins and ends when the clock of its time zone first shows that time or a later one. So a window that ends at
2:30 ends once in the night in which 2:30 comes twice, and at 3:00 in the night in which 2:30 is skipped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec import Meta

ScheduleMode = Literal["always", "scheduled", "idle"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]

DAYS: tuple[Day, ...] = get_args(Day)
_TIME = re.compile(r"(?P<hour>[01]\d|2[0-3]):(?P<minute>[0-5]\d)|24:00")
_MIDNIGHT = "24:00"
_HORIZON_DAYS = 8  # a week, and the day on which it began


class PoolWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Times at which a pool is open. Without times: all day."""

    days: Annotated[tuple[Day, ...], Meta(description="Days on which it begins: `mon` to `sun`.")] = DAYS
    start: Annotated[str, Meta(description="Local time at which it begins, such as `22:00`.")] = "00:00"
    end: Annotated[
        str, Meta(description="Local time at which it ends, on the next day if it is not later than `start`.")
    ] = _MIDNIGHT


class PoolSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """When a pool is open."""

    mode: Annotated[
        ScheduleMode,
        Meta(
            description="`always`; `scheduled`: in its windows; `idle`: each node while its owner leaves it alone, in "
            "its windows if it has any."
        ),
    ] = "always"
    timezone: Annotated[str, Meta(description="Time zone of the windows, such as `Europe/Berlin`.")] = "UTC"
    windows: Annotated[
        tuple[PoolWindow, ...], Meta(description="Tables with `days`, `start` and `end`; it is open in each of them.")
    ] = ()


def find_zone(name: str) -> tzinfo:
    """Return a time zone by its IANA name. Raises `ValueError`."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a folder
        hint = "" if _has_zones() else ", and this system has no time zones: pip install tzdata"
        raise ValueError(f"unknown time zone{hint}") from None


def check_time(text: str, *, end: bool = False) -> None:
    """Check a time of a window: HH:MM, also 24:00 at its end. Raises `ValueError`."""
    if not _TIME.fullmatch(text) or (text == _MIDNIGHT and not end):
        raise ValueError('expected a time such as "06:30", from "00:00" to ' + ('"24:00"' if end else '"23:59"'))


def is_open(schedule: PoolSchedule, now: float) -> bool:
    """Return whether a schedule has a window at a Unix time. A schedule without windows is always open."""
    if not schedule.windows:
        return True
    local = datetime.fromtimestamp(now, find_zone(schedule.timezone)).replace(tzinfo=None)
    return any(
        (local >= begins or now >= begins_at) and not (local >= ends or now >= ends_at)
        for begins, begins_at, ends, ends_at in _windows_of(schedule, local.date())
    )


@functools.lru_cache(maxsize=256)
def _windows_of(schedule: PoolSchedule, day: date) -> tuple[tuple[datetime, float, datetime, float], ...]:
    """Return the begins and ends of the windows that may be open on a day: what the clock shows, and Unix times.

    Kept, because the controller asks for each pool twice a second.
    """
    zone, days = find_zone(schedule.timezone), (day - timedelta(days=1), day)
    return tuple(
        (begins.replace(tzinfo=None), begins.timestamp(), ends.replace(tzinfo=None), ends.timestamp())
        for window in schedule.windows
        for begins, ends in _occurrences(window, days, zone)
    )


def next_change(schedule: PoolSchedule, now: float) -> float | None:
    """Return the Unix time at which a schedule next opens or closes; None if it never does."""
    if not schedule.windows:
        return None
    zone = find_zone(schedule.timezone)
    today = datetime.fromtimestamp(now, zone).date()
    days = [today + timedelta(days=offset) for offset in range(-1, _HORIZON_DAYS + 1)]
    edges = {
        _first_instant(edge)
        for window in schedule.windows
        for occurrence in _occurrences(window, days, zone)
        for edge in occurrence
    }
    opened = is_open(schedule, now)
    return next((edge for edge in sorted(edges) if edge > now and is_open(schedule, edge) != opened), None)


def _occurrences(window: PoolWindow, days: Sequence[date], zone: tzinfo) -> list[tuple[datetime, datetime]]:
    """Return when a window begins and ends, on those of the days on which it begins."""
    crosses = window.end <= window.start  # texts of equal length compare like times
    found = []
    for day in days:
        if DAYS[day.weekday()] in window.days:
            last = day + timedelta(days=1) if crosses or window.end == _MIDNIGHT else day
            begins = datetime.combine(day, time.fromisoformat(window.start), zone)
            ends = datetime.combine(last, time() if window.end == _MIDNIGHT else time.fromisoformat(window.end), zone)
            found.append((begins, ends))
    return found


def _reached(edge: datetime, at: datetime) -> bool:
    """Return whether the clock of a zone has shown the time of `edge` or a later one, by the time `at`."""
    return at.replace(tzinfo=None) >= edge.replace(tzinfo=None) or at.timestamp() >= edge.timestamp()


def _first_instant(edge: datetime) -> float:
    """Return the Unix time at which the clock of a zone first shows a time, or skips it."""
    after, before = edge.timestamp(), edge.replace(fold=1).timestamp()
    zone = edge.tzinfo
    if before >= after:
        return after
    while after - before > 1:  # it is skipped between these two: find the change of the clock
        middle = (before + after) // 2
        if _reached(edge, datetime.fromtimestamp(middle, zone)):
            after = middle
        else:
            before = middle
    return after


def _has_zones() -> bool:
    try:
        ZoneInfo("Europe/London")
    except (ZoneInfoNotFoundError, OSError):
        return False
    return True
