from __future__ import annotations

from typing import Any

import pytest

from syringa.errors import NotFound
from syringa.store import Store, StoredFile
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, read, write
from tests.store.queries.test_batches import batch


def file(id: str, **changes: Any) -> StoredFile:
    given = {"organization": US, "created_at": START, "filename": "a.jsonl", "purpose": "batch", "bytes": 10}
    return StoredFile(id=id, **(given | changes))


async def test_files_belong_to_one_organization(store: Store) -> None:
    assert await write(store).files.create(file("file-1"))
    assert await read(store).files.get(US, "file-1") == file("file-1")
    assert await read(store).files.get("other", "file-1") is None
    assert not await write(store).files.delete("other", "file-1")
    assert await write(store).files.delete(US, "file-1")
    assert await read(store).files.get(US, "file-1") is None


async def test_files_beyond_the_quota_are_not_created(store: Store, clock: Clock) -> None:
    assert await write(store).files.create(file("file-1", expires_at=START + 10), 25)
    assert await write(store).files.create(file("file-2"), 25)
    assert not await write(store).files.create(file("file-3"), 25)
    assert await write(store).files.create(file("file-3", organization="other"), 25)
    assert await read(store).files.total_bytes(US) == 20
    clock.now += 10  # what has expired does not count
    assert await write(store).files.create(file("file-4"), 25)


async def test_pages_of_files(store: Store) -> None:
    for number in range(5):
        purpose = "batch" if number % 2 else "batch_output"
        await write(store).files.create(file(f"file-{number}", created_at=START + number // 2, purpose=purpose))
    first, more = await read(store).files.page(US, limit=3)
    assert [each.id for each in first] == ["file-4", "file-3", "file-2"]
    assert more
    rest, more = await read(store).files.page(US, limit=3, after="file-2")
    assert [each.id for each in rest] == ["file-1", "file-0"]
    assert not more
    oldest, _ = await read(store).files.page(US, order="asc", after="file-0", purpose="batch")
    assert [each.id for each in oldest] == ["file-1", "file-3"]
    with pytest.raises(NotFound):
        await read(store).files.page(US, after="file-9")


async def test_expired_files_are_hidden_and_removed_unless_a_batch_needs_them(store: Store, clock: Clock) -> None:
    await write(store).files.create(file("file-1", expires_at=START + 10))
    await write(store).files.create(file("file-2", expires_at=START + 10))
    await write(store).batches.create(batch("batch_1", input_file="file-2"))
    assert await read(store).files.is_used(US, "file-2")
    assert await write(store).files.expire() == []
    clock.now += 10
    assert await read(store).files.get(US, "file-1") is None
    assert [each.id for each in await write(store).files.expire()] == ["file-1"]
    await write(store).batches.change(US, "batch_1", ("validating",), "failed", START)
    assert [each.id for each in await write(store).files.expire()] == ["file-2"]


async def test_known_ids_are_those_with_a_row(store: Store) -> None:
    await write(store).files.create(file("file-1"))
    assert await read(store).files.known(["file-1", "file-2"]) == {"file-1"}
