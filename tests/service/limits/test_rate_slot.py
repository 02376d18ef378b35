from __future__ import annotations

import pytest

from syringa.service.limits.rate_slot import HEADER, MICRO, SLOT, RateSlot
from syringa.service.limits.shared_table import SharedRateTable


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Table(SharedRateTable):
    """A table with one slot, whose position is known."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, index=0, clock=clock, slots=1)

    def slot(self) -> RateSlot:
        found = self.find("acme")
        assert found is not None
        return found

    def add(self, requests: int = 0, tokens: int = 0) -> None:
        with self:
            slot = self.slot()
            slot.requests.add(requests)
            slot.tokens.add(tokens)

    @property
    def used(self) -> tuple[int, int]:
        with self:
            slot = self.slot()
            return slot.requests.used, slot.tokens.used


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Table:
    return Table(clock)


def test_count_expires_after_exactly_a_minute(table: Table, clock: Clock) -> None:
    clock.now = 1000.25
    table.add(requests=3, tokens=70)
    clock.now = 1060.249999
    assert table.used == (3, 70)
    clock.now = 1060.25
    assert table.used == (0, 0)


def test_window_slides_by_seconds(table: Table, clock: Clock) -> None:
    for second in range(60):
        clock.now = 1000.5 + second
        table.add(requests=second + 1)
    for second in range(60):
        clock.now = 1060.499 + second
        assert table.used[0] == sum(range(second + 1, 61))
        clock.now = 1060.5 + second
        assert table.used[0] == sum(range(second + 2, 61))


def test_counts_of_a_second_expire_with_the_last(table: Table, clock: Clock) -> None:
    for clock.now in (1000.1, 1000.8):
        table.add(requests=1)
    clock.now = 1060.5
    assert table.used[0] == 2
    clock.now = 1060.8
    assert table.used[0] == 0


def test_tokens_and_requests_expire_independently(table: Table, clock: Clock) -> None:
    clock.now = 1000.1
    table.add(requests=1)
    clock.now = 1000.8
    with table:
        table.slot().tokens.add(5)
    clock.now = 1060.5
    assert table.used == (0, 5)


def test_reused_bin_is_cleared(table: Table, clock: Clock) -> None:
    table.add(requests=7)
    clock.now += 61
    table.add(requests=1)
    assert table.used[0] == 1
    clock.now += 61 * 1000
    assert table.used[0] == 0


def test_wait_until_below_limit(table: Table, clock: Clock) -> None:
    for clock.now, number in ((1000.5, 2), (1010.0, 3), (1030.25, 1)):
        table.add(requests=number)
    clock.now = 1040.0
    with table:
        requests = table.slot().requests
        waits = [requests.wait(limit) for limit in range(1, 8)]
        assert waits == [50.25, 30.0, 30.0, 30.0, 20.5, 20.5, 0.0]
        assert requests.reset() == 50.25


def test_no_wait_when_empty(table: Table) -> None:
    with table:
        assert table.slot().requests.wait(1) == 0.0
        assert table.slot().tokens.reset() == 0.0


def test_wait_is_at_most_a_minute(table: Table, clock: Clock) -> None:
    clock.now = 1000.999999
    table.add(requests=1)
    with table:
        assert table.slot().requests.wait(1) == 60.0


def test_count_saturates(table: Table, clock: Clock) -> None:
    table.add(tokens=2**31)
    table.add(tokens=2**40)
    assert table.used[1] == 2**32 - 1
    clock.now += 1
    table.add(tokens=5)
    assert table.used[1] == 2**32 + 4


def test_running_count(table: Table) -> None:
    with table:
        slot = table.slot()
        slot.begin()
        slot.begin()
        assert slot.running() == 2
        slot.end()
        assert slot.running() == 1
        for _ in range(3):
            slot.end()
        assert slot.running() == 0
        slot.begin()
        assert slot.running() == 1


@pytest.mark.parametrize("microsecond", [0, MICRO - 1, MICRO, 2**32 - 1])
@pytest.mark.parametrize("second", [0, 939, 940, 1000, 1001, 2**32 - 1])
def test_corrupt_slot_recovers_within_a_minute(table: Table, clock: Clock, second: int, microsecond: int) -> None:
    table.add(requests=1)
    with table:
        words = table._words
        words[HEADER + 4] = second
        for word in range(HEADER + 5, HEADER + 5 + 61):  # counts of requests, followed by their times
            words[word] = 2**32 - 1
            words[word + 61] = microsecond
        assert 0 <= table.slot().requests.wait(1) <= 60
        assert 0 <= table.slot().requests.reset() <= 60
    clock.now += 61
    assert table.used[0] == 0
    table.add(requests=1)
    assert table.used[0] == 1


def test_slots_are_isolated(clock: Clock) -> None:
    """A slot does not write outside of its memory."""
    table = SharedRateTable(None, index=63, clock=clock, slots=2)
    with table:
        for base in (HEADER, HEADER + SLOT):
            RateSlot(table._words, base, int(clock.now * MICRO), 63, table._generation).advance()
        first = RateSlot(table._words, HEADER, int(clock.now * MICRO), 63, table._generation)
        other = bytes(table._memory[4 * (HEADER + SLOT) :])
        for second in range(61):
            first.now = int((clock.now + second) * MICRO)
            first.advance()
            first.requests.add(2**32 - 1)
            first.tokens.add(2**32 - 1)
        first.begin()
        assert (first.requests.used, first.tokens.used, first.running()) == (60 * (2**32 - 1),) * 2 + (1,)
        assert bytes(table._memory[4 * (HEADER + SLOT) :]) == other
