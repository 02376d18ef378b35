from __future__ import annotations

from collections.abc import Callable

import pytest

from syringa.engine.client.silence import SilenceMonitor


class FakeTimers:
    """A clock and timers that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[FakeTimer] = []

    def clock(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        assert delay >= 0
        self._timers.append(FakeTimer(self.now + delay, callback))
        return self._timers[-1]

    @property
    def pending(self) -> int:
        return sum(not timer.canceled for timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass, and run the timers that become due, each at its time."""
        end = self.now + seconds
        while due := [each for each in self._timers if each.due <= end]:
            timer = min(due, key=lambda each: each.due)
            self._timers.remove(timer)
            self.now = max(self.now, timer.due)
            if not timer.canceled:
                timer.callback()
        self.now = end

    def pause(self, seconds: float) -> None:
        """Let time pass while this process is stopped: no timer runs."""
        self.now += seconds


class FakeTimer:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due, self.callback, self.canceled = due, callback, False

    def cancel(self) -> None:
        self.canceled = True


@pytest.fixture
def timers() -> FakeTimers:
    return FakeTimers()


@pytest.fixture
def changes() -> list[bool]:
    return []


@pytest.fixture
def monitor(timers: FakeTimers, changes: list[bool]) -> SilenceMonitor:
    return SilenceMonitor(changes.append, clock=timers.clock, call_later=timers.call_later)


def test_monitor_reports_silence_once_after_two_seconds(
    monitor: SilenceMonitor, timers: FakeTimers, changes: list[bool]
) -> None:
    monitor.start()
    timers.advance(1.99)
    assert changes == []
    timers.advance(0.01)
    assert monitor.silent
    timers.advance(60)
    assert changes == [True]


def test_monitor_is_not_silent_while_heartbeats_arrive(
    monitor: SilenceMonitor, timers: FakeTimers, changes: list[bool]
) -> None:
    monitor.start()
    for interval in [0.5, 1.4, 0.1, 1.9] * 20:
        timers.advance(interval)
        monitor.heard()
    assert changes == []
    assert timers.pending == 1


def test_monitor_counts_from_the_last_frame(monitor: SilenceMonitor, timers: FakeTimers, changes: list[bool]) -> None:
    monitor.start()
    timers.advance(1.7)
    monitor.heard()
    timers.advance(1.9)
    assert changes == []
    timers.advance(0.2)
    assert monitor.silent


def test_monitor_reports_the_end_of_silence_once_and_watches_again(
    monitor: SilenceMonitor, timers: FakeTimers, changes: list[bool]
) -> None:
    monitor.start()
    timers.advance(3)
    monitor.heard()
    monitor.heard()
    assert changes == [True, False]
    assert not monitor.silent
    timers.advance(3)
    assert changes == [True, False, True]


def test_monitor_gives_workers_another_heartbeat_after_this_process_was_stopped(
    monitor: SilenceMonitor, timers: FakeTimers, changes: list[bool]
) -> None:
    """Data of a healthy worker waits in the socket. The timer may run before it is read."""
    monitor.start()
    timers.advance(0.3)
    timers.pause(30)
    timers.advance(0)
    assert not monitor.silent
    monitor.heard()
    timers.advance(1)
    assert changes == []
    timers.pause(30)
    timers.advance(0)
    timers.advance(0.5)
    assert changes == [True]  # nothing was heard within the heartbeat


def test_stopped_monitor_is_not_silent_and_starts_anew(
    monitor: SilenceMonitor, timers: FakeTimers, changes: list[bool]
) -> None:
    monitor.start()
    timers.advance(3)
    monitor.stop()
    assert not monitor.silent
    assert timers.pending == 0
    monitor.start()
    timers.advance(1.5)
    monitor.stop()
    timers.advance(60)
    assert changes == [True]
