from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from syringa.errors import NotFound, PayloadTooLarge, RateLimited, StoreOutcomeUnknown, StoreUnavailable
from syringa.service.files.manager import FileManager
from syringa.service.files.storage import CHUNK_BYTES, FileStorage, files_folder
from syringa.store import Store
from syringa.store.url import locate
from tests.store.helpers import START, Clock, read


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    async with Store(str(tmp_path / "a.db"), clock=clock) as store:
        yield store


@pytest.fixture
async def files(store: Store, clock: Clock, tmp_path: Path) -> AsyncIterator[FileManager]:
    manager = FileManager(store, FileStorage(tmp_path / "files"), quota=3 * CHUNK_BYTES, days=1, clock=clock)
    yield manager
    await manager.close()


def on_disk(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "files").rglob("*") if path.is_file())


async def test_file_is_on_disk_when_its_row_is_written(files: FileManager, store: Store, tmp_path: Path) -> None:
    writer = files.new_writer()
    for _ in range(5):
        await writer.write(b"x" * (CHUNK_BYTES // 2))
    assert [path.suffix for path in on_disk(tmp_path)] == [".part"]
    file = await files.add(writer, "acme", "a.jsonl", "batch")
    assert (file.bytes, file.expires_at) == (5 * CHUNK_BYTES // 2, START + 86400)
    (path,) = on_disk(tmp_path)
    assert (path.name, path.stat().st_mode & 0o777) == (file.id, 0o600)
    assert await read(store).files.get("acme", file.id) == file
    with await files.open(file.id) as opened:
        assert len(opened.read()) == file.bytes


async def test_upload_beyond_the_quota_is_refused(files: FileManager, store: Store, tmp_path: Path) -> None:
    with pytest.raises(PayloadTooLarge):
        async with files.reserve("acme", 4 * CHUNK_BYTES):
            pass
    writer = files.new_writer()
    await writer.write(b"x" * (4 * CHUNK_BYTES))
    with pytest.raises(PayloadTooLarge, match="delete some first"):
        await files.add(writer, "acme", "a", "batch")
    assert await read(store).files.page("acme") == ([], False)
    assert on_disk(tmp_path) == []


async def test_uploads_in_progress_count_against_the_quota(files: FileManager) -> None:
    async with files.reserve("acme", 2 * CHUNK_BYTES):
        with pytest.raises(RateLimited):
            async with files.reserve("acme", 2 * CHUNK_BYTES):
                pass
        with pytest.raises(PayloadTooLarge):  # whatever becomes of the other
            async with files.reserve("acme", 4 * CHUNK_BYTES):
                pass
        async with files.reserve("acme", CHUNK_BYTES), files.reserve("other", 3 * CHUNK_BYTES):
            pass
    with pytest.raises(RuntimeError):
        async with files.reserve("acme", 3 * CHUNK_BYTES):
            raise RuntimeError
    async with files.reserve("acme", 3 * CHUNK_BYTES):
        pass


async def test_upload_of_unknown_size_takes_what_is_left_of_the_quota(files: FileManager) -> None:
    async with files.reserve("acme", None, CHUNK_BYTES):
        async with files.reserve("acme", None, 9 * CHUNK_BYTES):
            with pytest.raises(RateLimited):
                async with files.reserve("acme", None, 9 * CHUNK_BYTES):
                    pass
        async with files.reserve("acme", 2 * CHUNK_BYTES):
            pass


@pytest.mark.parametrize("known", [True, False])
async def test_bytes_stay_only_if_their_row_may_have_been_written(
    files: FileManager, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    async def fail(query: object) -> None:
        raise StoreUnavailable("the disk is full") if known else StoreOutcomeUnknown("no answer")

    writer = files.new_writer()
    await writer.write(b"x")
    monkeypatch.setattr(store, "write", fail)
    with pytest.raises(StoreUnavailable):
        await files.add(writer, "acme", "a", "batch")
    assert len(on_disk(tmp_path)) == (0 if known else 1)


async def test_discarded_file_leaves_nothing(files: FileManager, tmp_path: Path) -> None:
    for finished in (False, True):
        writer = files.new_writer()
        await writer.write(b"x" * CHUNK_BYTES)
        if finished:
            await writer.finish()
        await writer.discard()
    assert on_disk(tmp_path) == []


async def test_expired_files_are_removed_from_disk(
    files: FileManager, store: Store, clock: Clock, tmp_path: Path
) -> None:
    writer = files.new_writer()
    await writer.write(b"x")
    await files.add(writer, "acme", "a", "batch", seconds=60)
    clock.now += 61
    assert await files.expire() == 1
    assert on_disk(tmp_path) == []


async def test_bytes_without_a_row_are_removed_as_garbage(files: FileManager, store: Store, tmp_path: Path) -> None:
    kept, lost, interrupted = files.new_writer(), files.new_writer(), files.new_writer()
    for writer in (kept, lost, interrupted):
        await writer.write(b"x" * CHUNK_BYTES)
    await files.add(kept, "acme", "a", "batch")
    await lost.finish()
    assert await files.collect_garbage() == 0  # they may be about to be inserted
    for path in on_disk(tmp_path):
        os.utime(path, (0, 0))
    assert await files.collect_garbage() == 1
    assert [path.name for path in on_disk(tmp_path)] == [kept.id]
    await interrupted.discard()


async def test_missing_bytes_are_not_found(files: FileManager) -> None:
    with pytest.raises(NotFound, match="not on this server"):
        await files.open("file-0123")


async def test_unreadable_bytes_are_a_temporary_error(files: FileManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(storage: FileStorage, id: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(FileStorage, "open", fail)
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        await files.open("file-0123")


async def test_unwritable_folder_is_a_temporary_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("not a folder")
    manager = FileManager(store, FileStorage(tmp_path / "files"), quota=0, days=0)
    writer = manager.new_writer()
    with pytest.raises(StoreUnavailable, match="cannot be stored"):
        await writer.write(b"x" * CHUNK_BYTES)
    await writer.discard()
    await manager.close()


async def test_canceled_write_does_not_leave_the_file_open(files: FileManager, tmp_path: Path) -> None:
    writer = files.new_writer()
    task = asyncio.create_task(writer.write(b"x" * CHUNK_BYTES))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await writer.discard()
    assert on_disk(tmp_path) == []


def test_files_are_beside_a_sqlite_database_unless_configured(tmp_path: Path) -> None:
    location = locate(str(tmp_path / "a.db"))
    assert files_folder(location) == tmp_path / "a.db-files"
    assert files_folder(location, str(tmp_path / "other")) == tmp_path / "other"
