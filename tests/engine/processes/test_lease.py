"""The lease on decisions: kept by a thread, taken over when it expires, and in a real database."""

from __future__ import annotations

import threading
from pathlib import Path

from syringa.cli.fleet_lease import DatabaseLease
from syringa.engine.processes.lease import LEASE_SECONDS, LeaseKeeper

HANG_SECONDS = 60.0


class FakeLease:
    """A lease in memory, with a clock of the test."""

    def __init__(self) -> None:
        self.now, self.owner, self.until = 0.0, "", 0.0
        self.broken = False

    def of(self, owner: str) -> FakeShare:
        return FakeShare(self, owner)


class FakeShare:
    def __init__(self, lease: FakeLease, owner: str) -> None:
        self._lease, self._owner = lease, owner
        self.calls = threading.Semaphore(0)
        self.released = threading.Event()

    def take(self, seconds: float) -> bool:
        lease = self._lease
        self.calls.release()
        if lease.broken:
            raise OSError("the database is locked")
        if lease.owner in ("", self._owner) or lease.now >= lease.until:
            lease.owner, lease.until = self._owner, lease.now + seconds
        return lease.owner == self._owner

    def release(self) -> None:
        if self._lease.owner == self._owner:
            self._lease.owner = ""
        self.released.set()


def keeper(lease: FakeLease, owner: str) -> LeaseKeeper:
    return LeaseKeeper(lease.of(owner), lambda: lease.now)


def holds(keeper: LeaseKeeper) -> bool:
    return keeper.held


def test_one_of_two_servers_holds_the_lease_until_it_stops_renewing() -> None:
    lease = FakeLease()
    first, second = keeper(lease, "a"), keeper(lease, "b")
    assert not first.held
    first.renew()
    second.renew()
    assert (first.held, second.held) == (True, False)
    assert "another server" in second.reason
    lease.now += LEASE_SECONDS - 1
    first.renew()
    lease.now += LEASE_SECONDS - 1
    second.renew()
    assert (first.held, second.held) == (True, False)
    lease.now += 1
    assert not first.held  # before another one may have it
    second.renew()
    first.renew()
    assert (first.held, second.held) == (False, True)


def test_lease_is_lost_while_the_database_does_not_answer() -> None:
    lease = FakeLease()
    only = keeper(lease, "a")
    only.renew()
    lease.broken = True
    lease.now += LEASE_SECONDS - 1
    only.renew()
    assert holds(only)  # nothing else can have it yet
    lease.now += 1
    only.renew()
    assert not holds(only)
    assert "does not answer" in only.reason
    lease.broken = False
    only.renew()
    assert holds(only)


def test_keeper_takes_the_lease_in_a_thread_and_gives_it_back() -> None:
    lease = FakeLease()
    share = lease.of("a")
    first = LeaseKeeper(share, lambda: lease.now)
    first.start()
    assert share.calls.acquire(timeout=HANG_SECONDS)
    first.stop()
    assert share.released.wait(HANG_SECONDS)
    assert not first.held
    second = keeper(lease, "b")
    second.renew()
    assert second.held


def test_lease_in_a_database_has_one_owner(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'test.db'}"
    first, second = DatabaseLease(database, "fleet-1", "a"), DatabaseLease(database, "fleet-1", "b")
    other = DatabaseLease(database, "fleet-2", "c")  # of another cluster
    assert first.take(60.0)
    assert not second.take(60.0)
    assert other.take(60.0)
    other.release()
    assert first.take(60.0)
    first.release()
    assert second.take(60.0)
    second.release()
    second.release()  # nothing is left to be released
