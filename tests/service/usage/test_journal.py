from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from syringa.config import Config
from syringa.service.app_state import AppState
from syringa.service.auth.keys import ANONYMOUS
from syringa.service.usage import journal as module
from syringa.service.usage import writer as writer_module
from syringa.service.usage.journal import UsageJournal, journal_folder
from syringa.service.usage.writer import UsageWriter
from syringa.store import Store
from syringa.store.records import UsageRecord
from syringa.store.url import locate
from tests.service.usage.test_writer import FakeStore, record, refused, until
from tests.store.helpers import read


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stalls, the last write may take longer than a server would wait for it."""
    monkeypatch.setattr(writer_module, "CLOSE_SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(folder: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(folder)
    yield journal
    journal.close()


def recovered(folder: Path) -> list[UsageRecord]:
    """Return what a process that starts now would take over, and leave it there."""
    successor = UsageJournal(folder)
    try:
        return successor.recover()
    finally:
        successor.close()


def names(records: Sequence[UsageRecord]) -> list[str]:
    return [each.request_id for each in records]


def test_journal_keeps_records_of_ended_process(journal: UsageJournal, folder: Path) -> None:
    written = [record("a", user="ü\n", cost=0.1, first_token_seconds=0.5), record("b")]
    for each in written:
        journal.append(each)
    journal.close()
    assert recovered(folder) == written
    assert recovered(folder) == written  # until they are stored


def test_journal_creates_nothing_before_first_record(journal: UsageJournal, folder: Path) -> None:
    assert journal.recover() == []
    journal.rewrite([])
    assert not folder.exists()


def test_journal_is_readable_by_its_user_only(journal: UsageJournal, folder: Path) -> None:
    journal.append(record())
    journal.rewrite([record()])
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_journal_of_live_process_is_not_taken_over(journal: UsageJournal, folder: Path) -> None:
    journal.append(record("a"))
    other = UsageJournal(folder)
    assert other.recover() == []
    other.append(record("b"))
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["0.jsonl", "1.jsonl"]
    assert recovered(folder) == []
    other.close()
    assert names(recovered(folder)) == ["b"]


def test_journal_takes_over_all_files_of_ended_processes(folder: Path) -> None:
    processes = [UsageJournal(folder) for _ in range(3)]
    for number, each in enumerate(processes):
        each.append(record(str(number)))
    for each in processes:
        each.close()
    successor = UsageJournal(folder)
    assert names(successor.recover()) == ["0", "1", "2"]
    assert recovered(folder) == []  # they are in the journal of the successor
    successor.close()
    assert names(recovered(folder)) == ["0", "1", "2"]
    assert [path.stat().st_size > 0 for path in sorted(folder.glob("*.jsonl"))] == [True, False, False]


def test_journal_leaves_file_with_records_to_successor(journal: UsageJournal, folder: Path) -> None:
    """A process whose first request ends just after another process was killed must not take that one's file."""
    killed = UsageJournal(folder)
    killed.append(record("a"))
    killed.close()
    journal.append(record("b"))
    journal.rewrite([])
    assert names(recovered(folder)) == ["a"]


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_journal_ignores_torn_last_line(journal: UsageJournal, folder: Path, cut: int) -> None:
    journal.append(record("a"))
    journal.append(record("b"))
    journal.close()
    path = folder / "0.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    successor = UsageJournal(folder)
    assert names(successor.recover()) == ["a"]
    successor.append(record("c"))
    successor.close()
    assert names(recovered(folder)) == ["a", "c"]


def test_journal_skips_damaged_lines(journal: UsageJournal, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal.append(record("a"))
    journal.close()
    with (folder / "0.jsonl").open("ab") as file:
        file.write(b'\0\0\0\n{"at": "never"}\n\n')
        file.write(module._line(record("b")))
    assert names(recovered(folder)) == ["a", "b"]
    assert "count=3" in caplog.text


def test_last_state_of_merged_record_counts(journal: UsageJournal, folder: Path) -> None:
    journal.append(refused(id="x"))
    journal.append(refused(id="x", requests=2))
    journal.close()
    assert [each.requests for each in recovered(folder)] == [2]


def test_rewrite_keeps_given_records_only(journal: UsageJournal, folder: Path) -> None:
    first, second = record("a"), record("b")
    journal.append(first)
    journal.append(second)
    journal.rewrite([second])
    journal.append(record("c"))
    assert journal.lines == 2
    journal.close()
    assert names(recovered(folder)) == ["b", "c"]


def test_rewrite_of_nothing_empties_file(journal: UsageJournal, folder: Path) -> None:
    journal.append(record("a"))
    journal.rewrite([])
    assert (folder / "0.jsonl").stat().st_size == 0
    journal.append(record("b"))
    journal.close()
    assert names(recovered(folder)) == ["b"]


def test_process_killed_during_rewrite_loses_nothing(
    journal: UsageJournal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = record("a"), record("b")
    journal.append(first)
    journal.append(second)
    contents = (folder / "0.jsonl").read_bytes()
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "killed here")))
    journal.rewrite([second])
    assert (folder / "0.jsonl").read_bytes() == contents


def test_unwritable_folder_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = UsageJournal(tmp_path / "file" / "journal")
    assert journal.recover() == []
    for _ in range(3):
        journal.append(record())
        journal.rewrite([])
    assert len(caplog.records) == 1
    assert "usage journal: cannot be written" in caplog.text
    journal.close()


def test_full_disk_leaves_complete_lines_and_journal_recovers(
    journal: UsageJournal, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files stands for the disk: it accepts a part of the line, too."""
    journal.append(record("a"))
    path = folder / "0.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    second = record("b")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
        journal.append(second)
        assert not journal.usable
        journal.append(record("not tried"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"\n")
    journal.rewrite([second])
    journal.append(record("c"))
    assert [each.message.partition(":")[2].split(":")[0].split(";")[0] for each in caplog.records] == [
        " cannot be written",
        " records are written again",
    ]
    journal.close()
    assert names(recovered(folder)) == ["b", "c"]


def test_journal_folder_belongs_to_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert journal_folder(locate(str(tmp_path / "a.db"))) == tmp_path / "a.db-usage"
    pytest.importorskip("psycopg")
    folder = journal_folder(locate("postgresql://me:old@host/name"))
    assert folder.parent == tmp_path / "syringa"
    assert journal_folder(locate("postgresql://me:new@host/name")) == folder
    assert journal_folder(locate("postgresql://me:old@host/other")) != folder


async def test_writer_journals_record_until_it_is_stored(journal: UsageJournal, folder: Path) -> None:
    store = FakeStore()
    writer = UsageWriter(store.add, journal, flush_seconds=60)
    writer.add(record("a"))
    assert b'"request_id":"a"' in (folder / "0.jsonl").read_bytes()
    store.open.clear()
    flush = asyncio.create_task(writer.flush())
    await until(lambda: store.attempts > 0)
    writer.add(record("b"))  # while the first is being stored
    store.open.set()
    await flush
    journal.close()
    assert store.names == ["a"]
    assert names(recovered(folder)) == ["b"]


async def test_writer_stores_recovered_records_once(folder: Path) -> None:
    killed = UsageJournal(folder)
    for each in (record("a"), refused("b", requests=3)):
        killed.append(each)
    killed.close()
    store = FakeStore()
    writer = UsageWriter(store.add, UsageJournal(folder), flush_seconds=60)
    writer.recover()
    writer.add(refused("c"))  # not merged into a record that may be stored already
    await writer.close()
    [batch] = store.batches
    assert [(each.request_id, each.requests) for each in batch] == [("a", 1), ("b", 3), ("c", 1)]
    assert recovered(folder) == []


async def test_records_stay_in_journal_when_store_is_unavailable_at_close(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_SECONDS", 0.05)
    store = FakeStore()
    store.unavailable = True
    writer = UsageWriter(store.add, UsageJournal(folder), flush_seconds=60)
    writer.add(record("a"))
    await writer.close()
    assert "stored at the next start: count=1" in caplog.text
    assert names(recovered(folder)) == ["a"]


async def test_refusals_do_not_fill_disk_while_store_is_unavailable(journal: UsageJournal, folder: Path) -> None:
    writer = UsageWriter(FakeStore().add, journal, flush_seconds=60, max_records=10)
    for number in range(100):
        writer.add(refused(str(number)))
    assert journal.lines <= 20
    writer_count = [each.requests for each in writer._records.values()]
    journal.close()
    assert [each.requests for each in recovered(folder)] == writer_count == [100]
    await writer.close()


async def test_crash_between_commit_and_truncation_stores_nothing_twice(tmp_path: Path) -> None:
    database = str(tmp_path / "a.db")
    folder = journal_folder(locate(database))
    app_state = AppState(Config(database=database))
    await app_state.start()
    for name in ("a", "b"):
        app_state.start_accounting(ANONYMOUS, "/v1/completions", name).close()
    left_by_crash = (folder / "0.jsonl").read_bytes()
    await app_state.close()
    assert (folder / "0.jsonl").read_bytes() == b""
    (folder / "0.jsonl").write_bytes(left_by_crash)
    assert sorted(await stored_after_restart(database)) == ["a", "b"]


async def stored_after_restart(database: str) -> list[str]:
    """Start and stop a server's service state, and return the request ids of all usage records."""
    again = AppState(Config(database=database))
    await again.start()
    await again.close()
    async with Store(database) as store:
        return names(await read(store).usage.records(limit=10_000))


KILLED_PROCESS = """
import asyncio, os, signal, sys
from syringa.config import Config
from syringa.service.app_state import AppState
from syringa.service.auth.keys import ANONYMOUS
from syringa.store import Store

async def main():
    store = Store(sys.argv[1], lock_timeout=60.0)  # both processes begin with the same empty database
    app_state = AppState(Config(database=sys.argv[1]), store=store)
    await app_state.start()
    for number in range(int(sys.argv[3])):
        app_state.start_accounting(ANONYMOUS, "/v1/completions", f"{sys.argv[2]}{number}").close()
        if number == 3:
            await app_state.usage_writer.flush()
    print("ended", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def killed_processes(database: str) -> None:
    """Run two processes at once that are killed, with records that are stored, and others that are not."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED_PROCESS, database, name, "8"], stdout=subprocess.PIPE, env=os.environ.copy()
        )
        for name in "ab"
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert (output, process.returncode) == (b"ended\n", -signal.SIGKILL)


async def test_killed_processes_lose_no_record(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    await asyncio.to_thread(killed_processes, database)
    assert sorted(await stored_after_restart(database)) == [f"{name}{number}" for name in "ab" for number in range(8)]
