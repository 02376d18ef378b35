from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from syringa.errors import StartupError
from syringa.service.limits import shared_table as module
from syringa.service.limits.shared_table import SharedRateTable
from tests.service.limits.test_rate_slot import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "limits")
    SharedRateTable.create(path, slots=16)
    return path


def open_table(clock: Clock, slots: int = 16, path: str | None = None, index: int = 0) -> SharedRateTable:
    return SharedRateTable(path, index=index, clock=clock, slots=slots)


def add(table: SharedRateTable, name: str, number: int = 1) -> bool:
    """Return whether there was a slot."""
    with table:
        slot = table.find(name)
        if slot is not None:
            slot.requests.add(number)
        return slot is not None


def used(table: SharedRateTable, name: str) -> int | None:
    with table:
        slot = table.find(name, allocate=False)
        return None if slot is None else slot.requests.used


def begin(table: SharedRateTable, name: str) -> None:
    with table:
        slot = table.find(name)
        assert slot is not None
        slot.begin()


def running(table: SharedRateTable, name: str) -> int:
    with table:
        slot = table.find(name)
        assert slot is not None
        return slot.running()


def test_colliding_names_get_their_own_slots(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """All names have the same probe sequence."""
    monkeypatch.setattr(module, "_digest", lambda name: bytes(8) + name.encode().rjust(8, b"-"))
    table = open_table(clock)
    names = [f"n{number}" for number in range(16)]
    for number, name in enumerate(names):
        assert add(table, name, number + 1)
    assert [used(table, name) for name in names] == list(range(1, 17))


def test_every_slot_is_reachable(clock: Clock) -> None:
    table = open_table(clock, slots=64)
    assert all(add(table, f"n{number}", number + 1) for number in range(64))
    assert [used(table, f"n{number}") for number in range(64)] == list(range(1, 65))


def test_find_without_allocate_changes_nothing(clock: Clock) -> None:
    table = open_table(clock)
    before = bytes(table._memory)
    assert used(table, "acme") is None
    assert bytes(table._memory) == before


def test_full_table_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    table = open_table(clock, slots=2)
    assert add(table, "a")
    assert add(table, "b")
    assert not add(table, "c")
    assert not add(table, "d")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert (used(table, "a"), used(table, "b")) == (1, 1)


def test_idle_slot_is_reused_empty(clock: Clock) -> None:
    table = open_table(clock, slots=1)
    add(table, "a", 5)
    clock.now += 60
    assert not add(table, "b")  # not idle yet
    clock.now += 1
    assert add(table, "b")
    assert used(table, "b") == 1
    assert used(table, "a") is None
    clock.now += 61
    assert add(table, "a")
    assert used(table, "a") == 1


def test_slot_with_running_request_is_not_reused(clock: Clock) -> None:
    table = open_table(clock, slots=1)
    begin(table, "a")
    clock.now += 3600
    assert not add(table, "b")
    assert running(table, "a") == 1
    with table:
        slot = table.find("a")
        assert slot is not None
        slot.end()
    clock.now += 61
    assert add(table, "b")
    assert running(table, "b") == 0


def test_name_keeps_its_slot_when_an_earlier_one_becomes_idle(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_digest", lambda name: bytes(8) + name.encode().rjust(8, b"-"))
    table = open_table(clock)
    add(table, "first")
    clock.now += 30
    add(table, "second", 2)
    clock.now += 31  # the first slot is idle now
    assert add(table, "second", 3)
    assert used(table, "second") == 5


def test_slot_with_future_time_is_reused(clock: Clock) -> None:
    table = open_table(clock, slots=1)
    add(table, "a")
    clock.now -= 500  # as after corruption
    assert add(table, "b")
    assert used(table, "b") == 1


def test_processes_share_counts(clock: Clock, path: str) -> None:
    one, two = open_table(clock, path=path), open_table(clock, path=path, index=1)
    add(one, "acme", 2)
    add(two, "acme", 3)
    assert used(one, "acme") == used(two, "acme") == 5
    begin(one, "acme")
    begin(two, "acme")
    begin(two, "acme")
    assert running(one, "acme") == running(two, "acme") == 3


def test_restarted_process_releases_its_requests(clock: Clock, path: str) -> None:
    one, two = open_table(clock, path=path), open_table(clock, path=path, index=1)
    for name in ("acme", "globex"):
        begin(one, name)
        begin(two, name)
    again = open_table(clock, path=path, index=1)
    assert running(one, "acme") == running(one, "globex") == 1
    begin(again, "acme")
    assert running(one, "acme") == 2


def test_closed_process_releases_its_requests(clock: Clock, path: str) -> None:
    one, two = open_table(clock, path=path), open_table(clock, path=path, index=1)
    begin(one, "acme")
    begin(two, "acme")
    two.close()
    two.close()
    assert running(one, "acme") == 1


def test_generation_wraps_around(clock: Clock, path: str) -> None:
    """A generation has 16 bits and is never 0, or empty cells would count."""
    open_table(clock, path=path)._words[module.GENERATIONS] = 0xFFFF
    table = open_table(clock, path=path)
    assert table._generation == 1
    begin(table, "acme")
    assert running(table, "acme") == 1


@pytest.mark.parametrize("index", [-1, 64])
def test_too_many_processes_are_refused(clock: Clock, index: int) -> None:
    with pytest.raises(StartupError, match="At most 64"):
        open_table(clock, index=index)


@pytest.mark.parametrize("content", [b"", b"x", bytes(4096), bytes(100_000), b"1LRS" + bytes(8000)])
def test_invalid_file_is_refused(clock: Clock, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "limits"
    file.write_bytes(content)
    with pytest.raises(StartupError, match="limits"):
        open_table(clock, path=str(file))


def test_missing_file_is_refused(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be opened"):
        open_table(clock, path=str(tmp_path / "nothing"))


def test_create_makes_private_file_and_overwrites_none(path: str) -> None:
    assert os.stat(path).st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        SharedRateTable.create(path)


def test_close_leaves_no_file_descriptor(clock: Clock, path: str) -> None:
    def descriptors() -> int:
        """Of this file alone: the garbage of other tests may be collected at any time."""
        links = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
        return links.count(os.path.realpath(path))

    before = descriptors()
    table = open_table(clock, path=path)
    assert descriptors() > before
    table.close()
    for _ in range(3):
        open_table(clock, path=path).close()
    assert descriptors() == before


HOLDER = """
import sys, time
from syringa.service.limits.shared_table import SharedRateTable
table = SharedRateTable(sys.argv[1], index=1, clock=time.monotonic)
with table:
    slot = table.find("acme")
    slot.begin()
    slot.requests.add(1)
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(path: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock and runs a request."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_lock_of_killed_process_is_released(
    path: str, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    holder.kill()
    holder.wait()
    table = SharedRateTable(path, index=0, clock=time.monotonic)
    assert add(table, "acme")
    assert used(table, "acme") == 2
    assert not caplog.records
    assert running(table, "acme") == 1  # until another process replaces it
    SharedRateTable(path, index=1, clock=time.monotonic).close()
    assert running(table, "acme") == 0


def test_stopped_process_does_not_block_others(
    path: str, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.05)
    holder.send_signal(signal.SIGSTOP)
    table = SharedRateTable(path, index=0, clock=time.monotonic)
    assert add(table, "acme")
    assert add(table, "acme")
    assert len(caplog.records) == 1
    holder.kill()
    holder.wait()
    assert add(table, "acme")
    assert table._lock_timeout == 0.05
    assert used(table, "acme") == 4
    assert len(caplog.records) == 1
