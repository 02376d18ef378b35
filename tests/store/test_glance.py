from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from syringa.store import Store
from syringa.store.glance import Glance
from syringa.store.url import locate
from tests.store.queries.test_keys import key


def replace(old: Path, new: Path) -> None:
    new.rename(old)
    for more in ("-wal", "-shm"):
        Path(f"{old}{more}").unlink(missing_ok=True)


async def test_a_glance_sees_what_others_have_committed(tmp_path: Path) -> None:
    path = tmp_path / "a #1?.db"
    async with Store(str(path)) as store:
        await store.open()
        glance = Glance(locate(str(path)))
        before = glance.revisions()
        assert before is not None
        await store.keys.create(key("k1"))
        after = glance.revisions()
        assert after is not None
        assert after["keys"] > before.get("keys", 0)
        assert after == await store.read(lambda session: session.revisions.all())
        glance.close()
        assert glance.revisions() == after  # it opens the file again


async def test_a_file_that_takes_anothers_place_is_noticed(tmp_path: Path) -> None:
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for path in paths:
        async with Store(str(path)) as store:
            await store.keys.create(key("k1"))
            await asyncio.sleep(0.002)
    glance = Glance(locate(str(paths[0])))
    first = glance.revisions()
    replace(*paths)
    assert glance.revisions() not in (None, first)


async def test_what_cannot_be_told_at_once_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    assert Glance(locate(str(path))).revisions() is None
    assert not path.exists()
    path.write_bytes(b"this is no database, however long one looks at it" * 100)
    assert Glance(locate(str(path))).revisions() is None
    other = tmp_path / "b.db"
    sqlite3.connect(other).execute("CREATE TABLE x (y)").connection.close()
    assert Glance(locate(str(other))).revisions() is None


@pytest.mark.parametrize("wal", [True, False])
async def test_a_lock_is_not_waited_for(tmp_path: Path, wal: bool) -> None:
    path = tmp_path / "a.db"
    async with Store(str(path)) as store:
        await store.keys.create(key("k1"))
        expected = await store.revision("keys")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute(f"PRAGMA journal_mode = {'wal' if wal else 'delete'}")
    holder.execute("BEGIN EXCLUSIVE")
    found = Glance(locate(str(path))).revisions()
    assert (found or {}).get("keys") == (expected if wal else None)
    holder.close()
