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


def table(clock: Clock, slots: int = 16, path: str | None = None, index: int = 0) -> SharedRateTable:
    return SharedRateTable(path, index=index, clock=clock, slots=slots)


def add(windows: SharedRateTable, name: str, number: int = 1) -> bool:
    """Whether there was a slot for it."""
    with windows:
        slot = windows.find(name)
        if slot is not None:
            slot.requests.add(number)
        return slot is not None


def used(windows: SharedRateTable, name: str) -> int | None:
    with windows:
        slot = windows.find(name, take=False)
        return None if slot is None else slot.requests.used


def begin(windows: SharedRateTable, name: str) -> None:
    with windows:
        slot = windows.find(name)
        assert slot is not None
        slot.begin()


def running(windows: SharedRateTable, name: str) -> int:
    with windows:
        slot = windows.find(name)
        assert slot is not None
        return slot.running()


def test_names_that_want_the_same_place_keep_apart(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same first place, and the same way on from it."""
    monkeypatch.setattr(module, "_digest", lambda name: bytes(8) + name.encode().rjust(8, b"-"))
    windows = table(clock)
    names = [f"n{number}" for number in range(16)]
    for number, name in enumerate(names):
        assert add(windows, name, number + 1)
    assert [used(windows, name) for name in names] == list(range(1, 17))


def test_every_slot_can_be_found(clock: Clock) -> None:
    windows = table(clock, slots=64)
    assert all(add(windows, f"n{number}", number + 1) for number in range(64))
    assert [used(windows, f"n{number}") for number in range(64)] == list(range(1, 65))


def test_looking_does_not_take(clock: Clock) -> None:
    windows = table(clock)
    before = bytes(windows._memory)
    assert used(windows, "acme") is None
    assert bytes(windows._memory) == before


def test_a_full_table_has_no_more_slots_and_says_so_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    windows = table(clock, slots=2)
    assert add(windows, "a")
    assert add(windows, "b")
    assert not add(windows, "c")
    assert not add(windows, "d")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert (used(windows, "a"), used(windows, "b")) == (1, 1)


def test_an_idle_slot_is_taken_over_clean(clock: Clock) -> None:
    windows = table(clock, slots=1)
    add(windows, "a", 5)
    clock.now += 60
    assert not add(windows, "b")  # its second is not over
    clock.now += 1
    assert add(windows, "b")
    assert used(windows, "b") == 1
    assert used(windows, "a") is None
    clock.now += 61
    assert add(windows, "a")
    assert used(windows, "a") == 1


def test_a_slot_whose_name_runs_something_is_not_idle(clock: Clock) -> None:
    windows = table(clock, slots=1)
    begin(windows, "a")
    clock.now += 3600
    assert not add(windows, "b")
    assert running(windows, "a") == 1
    with windows:
        slot = windows.find("a")
        assert slot is not None
        slot.end()
    clock.now += 61
    assert add(windows, "b")
    assert running(windows, "b") == 0


def test_a_name_keeps_its_slot_when_one_before_it_becomes_free(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_digest", lambda name: bytes(8) + name.encode().rjust(8, b"-"))
    windows = table(clock)
    add(windows, "first")
    clock.now += 30
    add(windows, "second", 2)
    clock.now += 31  # the first is idle now
    assert add(windows, "second", 3)
    assert used(windows, "second") == 5


def test_a_second_from_the_future_does_not_keep_a_slot(clock: Clock) -> None:
    windows = table(clock, slots=1)
    add(windows, "a")
    clock.now -= 500  # as a broken word would look
    assert add(windows, "b")
    assert used(windows, "b") == 1


def test_processes_see_each_other(clock: Clock, path: str) -> None:
    one, two = table(clock, path=path), table(clock, path=path, index=1)
    add(one, "acme", 2)
    add(two, "acme", 3)
    assert used(one, "acme") == used(two, "acme") == 5
    begin(one, "acme")
    begin(two, "acme")
    begin(two, "acme")
    assert running(one, "acme") == running(two, "acme") == 3


def test_a_process_that_starts_again_frees_what_it_held(clock: Clock, path: str) -> None:
    one, two = table(clock, path=path), table(clock, path=path, index=1)
    for name in ("acme", "globex"):
        begin(one, name)
        begin(two, name)
    again = table(clock, path=path, index=1)
    assert running(one, "acme") == running(one, "globex") == 1
    begin(again, "acme")
    assert running(one, "acme") == 2


def test_a_process_that_ends_frees_what_it_held(clock: Clock, path: str) -> None:
    one, two = table(clock, path=path), table(clock, path=path, index=1)
    begin(one, "acme")
    begin(two, "acme")
    two.close()
    two.close()
    assert running(one, "acme") == 1


def test_a_life_that_has_come_round(clock: Clock, path: str) -> None:
    """The number of a life has sixteen bits, and is never 0, or empty cells would count."""
    table(clock, path=path)._words[module.LIVES] = 0xFFFF
    windows = table(clock, path=path)
    assert windows._life == 1
    begin(windows, "acme")
    assert running(windows, "acme") == 1


@pytest.mark.parametrize("index", [-1, 64])
def test_too_many_processes(clock: Clock, index: int) -> None:
    with pytest.raises(StartupError, match="At most 64"):
        table(clock, index=index)


@pytest.mark.parametrize("content", [b"", b"x", bytes(4096), bytes(100_000), b"1LRS" + bytes(8000)])
def test_a_file_that_is_something_else(clock: Clock, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "limits"
    file.write_bytes(content)
    with pytest.raises(StartupError, match="limits"):
        table(clock, path=str(file))


def test_a_file_that_is_not_there(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be opened"):
        table(clock, path=str(tmp_path / "nothing"))


def test_nobody_else_can_read_the_file_and_none_is_overwritten(path: str) -> None:
    assert os.stat(path).st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        SharedRateTable.create(path)


def test_nothing_is_left_open(clock: Clock, path: str) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        table(clock, path=path).close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


HOLDER = """
import sys, time
from syringa.service.limits.shared_table import SharedRateTable
windows = SharedRateTable(sys.argv[1], index=1, clock=time.monotonic)
with windows:
    slot = windows.find("acme")
    slot.begin()
    slot.requests.add(1)
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(path: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock, and runs something."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_lock_dies_with_the_process_that_held_it(
    path: str, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    holder.kill()
    holder.wait()
    windows = SharedRateTable(path, index=0, clock=time.monotonic)
    assert add(windows, "acme")
    assert used(windows, "acme") == 2
    assert not caplog.records
    assert running(windows, "acme") == 1  # until another process takes its place
    SharedRateTable(path, index=1, clock=time.monotonic).close()
    assert running(windows, "acme") == 0


def test_a_stopped_process_does_not_stop_the_others(
    path: str, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    holder.send_signal(signal.SIGSTOP)
    windows = SharedRateTable(path, index=0, clock=time.monotonic)
    assert add(windows, "acme")
    assert add(windows, "acme")
    assert len(caplog.records) == 1
    holder.kill()
    holder.wait()
    assert add(windows, "acme")
    assert windows._patience == 0.05
    assert used(windows, "acme") == 4
    assert len(caplog.records) == 1
