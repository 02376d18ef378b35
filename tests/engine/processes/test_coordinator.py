"""The lease on decisions, and what else servers share: kept by a thread, in memory and in a real database."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from syringa.cli.database_records import DatabaseRecords
from syringa.engine.processes import coordinator as coordinator_module
from syringa.engine.processes.coordinator import LEASE_SECONDS, ClusterCoordinator
from syringa.fleet.cluster_records import Renewal

HANG_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _no_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread renew the records only when it is woken, and wait for it as long as it takes."""
    monkeypatch.setattr(coordinator_module, "RENEW_SECONDS", 2 * HANG_SECONDS)
    for name in ("LEAVE_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(coordinator_module, name, HANG_SECONDS)


class FakeRecords:
    """The records of all servers, in memory, with a clock of the test."""

    def __init__(self) -> None:
        self.now, self.owner, self.until = 0.0, "", 0.0
        self.broken = False
        self.members: set[str] = set()
        self.overrides: dict[str, bool] = {}

    def of(self, server: str) -> FakeShare:
        return FakeShare(self, server)


class FakeShare:
    def __init__(self, records: FakeRecords, server: str) -> None:
        self._records, self._server = records, server
        self.calls = threading.Semaphore(0)
        self.closed = threading.Event()

    def renew(self, seconds: float, changes: Mapping[str, bool | None]) -> Renewal:
        records = self._records
        self._check()
        for pool, open in changes.items():
            records.overrides.pop(pool, None)
            if open is not None:
                records.overrides[pool] = open
        records.members.add(self._server)
        if records.owner in ("", self._server) or records.now >= records.until:
            records.owner, records.until = self._server, records.now + seconds
        self.calls.release()
        return Renewal(records.owner == self._server, dict(records.overrides))

    def leave(self, seconds: float) -> bool:
        self._check()
        self._records.members.discard(self._server)
        return bool(self._records.members)

    def close(self) -> None:
        if self._records.owner == self._server:
            self._records.owner = ""
        self.closed.set()

    def _check(self) -> None:
        if self._records.broken:
            self.calls.release()
            raise OSError("the database is locked")


def coordinator(records: FakeRecords, server: str) -> ClusterCoordinator:
    return ClusterCoordinator(records.of(server), lambda: records.now)


def decides(server: ClusterCoordinator) -> bool:
    return server.decides


def test_one_of_two_servers_decides_until_it_stops_renewing() -> None:
    records = FakeRecords()
    first, second = coordinator(records, "a"), coordinator(records, "b")
    assert not first.decides
    first.renew()
    second.renew()
    assert (first.decides, second.decides) == (True, False)
    assert "another server" in second.reason
    records.now += LEASE_SECONDS - 1
    first.renew()
    records.now += LEASE_SECONDS - 1
    second.renew()
    assert (first.decides, second.decides) == (True, False)
    records.now += 1
    assert not first.decides  # before another one may
    second.renew()
    first.renew()
    assert (first.decides, second.decides) == (False, True)


def test_lease_is_lost_while_the_database_does_not_answer() -> None:
    records = FakeRecords()
    only = coordinator(records, "a")
    only.renew()
    records.broken = True
    records.now += LEASE_SECONDS - 1
    only.renew()
    assert decides(only)  # nothing else can have it yet
    records.now += 1
    only.renew()
    assert not decides(only)
    assert "does not answer" in only.reason
    records.broken = False
    only.renew()
    assert decides(only)


def test_coordinator_takes_the_lease_in_a_thread_and_gives_it_back() -> None:
    records = FakeRecords()
    share = records.of("a")
    first = ClusterCoordinator(share, lambda: records.now)
    first.start()
    assert share.calls.acquire(timeout=HANG_SECONDS)
    first.stop()
    assert share.closed.wait(HANG_SECONDS)
    assert not first.decides
    assert records.members == set()
    second = coordinator(records, "b")
    second.renew()
    assert second.decides


def test_server_that_leaves_is_the_last_if_no_other_one_is_there() -> None:
    records = FakeRecords()
    shares = [records.of(name) for name in "ab"]
    first, second = (ClusterCoordinator(share, lambda: 0.0) for share in shares)
    for server, share in zip((first, second), shares, strict=True):
        server.start()
        assert share.calls.acquire(timeout=HANG_SECONDS)
    assert not first.leave()
    assert not first.decides
    assert second.leave()
    for server in (first, second):
        server.stop()


def test_server_that_leaves_is_not_the_last_if_the_database_does_not_answer() -> None:
    records = FakeRecords()
    share = records.of("a")
    only = ClusterCoordinator(share, lambda: 0.0)
    only.start()
    assert share.calls.acquire(timeout=HANG_SECONDS)
    records.broken = True
    assert not only.leave()
    only.stop()


def test_overrides_reach_other_servers_and_those_that_are_started_later() -> None:
    records = FakeRecords()
    first, second = coordinator(records, "a"), coordinator(records, "b")
    first.renew()
    second.overrides.set("night", False)
    assert second.overrides.get("night") is False  # at once
    assert first.overrides.get("night") is None
    second.renew()
    first.renew()
    assert first.overrides.get("night") is False
    later = coordinator(records, "c")
    later.renew()
    assert later.overrides.get("night") is False
    first.overrides.set("night", None)
    first.renew()
    second.renew()
    assert second.overrides.get("night") is None


def test_override_is_stored_when_the_database_answers_again_and_wakes_the_thread() -> None:
    records = FakeRecords()
    share = records.of("a")
    only = ClusterCoordinator(share, lambda: 0.0)
    only.start()
    assert share.calls.acquire(timeout=HANG_SECONDS)
    records.broken = True
    only.overrides.set("night", True)
    assert share.calls.acquire(timeout=HANG_SECONDS)
    assert only.overrides.get("night") is True
    records.broken = False
    only.overrides.set("day", False)
    assert share.calls.acquire(timeout=HANG_SECONDS)
    assert records.overrides == {"night": True, "day": False}
    only.stop()


def test_override_that_changes_while_it_is_stored_is_not_forgotten() -> None:
    only = coordinator(FakeRecords(), "a")
    overrides = only.overrides
    overrides.set("night", True)
    taken = overrides.changes()
    overrides.set("night", False)
    overrides.update(taken, {"night": True})
    assert overrides.get("night") is False
    assert overrides.changes() == {"night": False}
    only.renew()
    assert (overrides.get("night"), overrides.changes()) == (False, {})


def test_records_in_a_database_have_one_owner_of_the_lease_and_know_the_last_server(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'test.db'}"
    first, second = DatabaseRecords(database, "fleet-1", "a"), DatabaseRecords(database, "fleet-1", "b")
    other = DatabaseRecords(database, "fleet-2", "c")  # of another cluster
    assert first.renew(60.0, {"night": False, "day": True}) == Renewal(True, {"night": False, "day": True})
    assert second.renew(60.0, {"day": None}) == Renewal(False, {"night": False})
    assert other.renew(60.0, {}) == Renewal(True, {})
    assert not other.leave(60.0)
    other.close()
    assert first.renew(60.0, {}) == Renewal(True, {"night": False})
    assert first.leave(60.0)
    assert second.renew(60.0, {}).decides  # at once
    assert not second.leave(60.0)  # the last one keeps the lease until it has ended its replicas
    assert not first.renew(60.0, {}).decides
    second.close()
    assert first.renew(60.0, {}).decides
    first.close()
    first.close()  # nothing is left to be released


def test_server_that_has_died_is_forgotten_when_its_time_is_over(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'test.db'}"
    dead, alive = DatabaseRecords(database, "fleet-1", "a"), DatabaseRecords(database, "fleet-1", "b")
    dead.renew(0.0, {})
    assert alive.renew(60.0, {}).decides
    assert not alive.leave(60.0)
    for each in (dead, alive):
        each.close()
