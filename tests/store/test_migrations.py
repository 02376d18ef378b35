from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from sqlalchemy import inspect, text

from syringa.errors import StartupError
from syringa.store import Store, migrations, schema
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import database_of, items, read, response, write


async def applied(store: Store) -> list[tuple[int, str]]:
    await store.open()
    with database_of(store).engine.begin() as connection:
        rows = connection.execute(text("SELECT version, name FROM schema_migrations ORDER BY version"))
        return [(version, name) for version, name in rows]


async def test_fresh_database_matches_schema(store: Store) -> None:
    await store.open()
    with database_of(store).engine.begin() as connection:
        there = inspect(connection)
        assert set(there.get_table_names()) == {*schema.metadata.tables, "schema_migrations"}
        for name, table in schema.metadata.tables.items():
            columns = {each["name"]: each["nullable"] for each in there.get_columns(name)}
            assert columns == {each.name: each.nullable for each in table.columns}
            assert there.get_pk_constraint(name)["constrained_columns"] == [each.name for each in table.primary_key]


async def test_migrations_run_once_on_current_database(store: Store, database: str) -> None:
    expected = [(number, each.name) for number, each in enumerate(migrations.MIGRATIONS, start=1)]
    assert await applied(store) == expected
    await write(store).responses.create(response("r1"), items("i1"))
    async with Store(database) as again:
        assert await applied(again) == expected
        assert await read(again).responses.get(US, "r1") == response("r1")


async def test_second_migration_runs_in_order(store: Store, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(store).responses.create(response("r1"))
    added = migrations.Migration(
        "later", ("ALTER TABLE responses ADD COLUMN later TEXT", "CREATE TABLE keys (id TEXT)")
    )
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, added))
    async with Store(database) as newer:
        assert await applied(newer) == [(n, each.name) for n, each in enumerate(migrations.MIGRATIONS, start=1)]
        assert await read(newer).responses.get(US, "r1") == response("r1")


async def test_failed_migration_is_rolled_back(store: Store, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.open()
    broken = migrations.Migration("broken", ("CREATE TABLE half (id TEXT)", "CREATE TABLE nonsense ("))
    with monkeypatch.context() as changed:
        changed.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
        async with Store(database) as newer:
            with pytest.raises(Exception, match="at the moment"):
                await newer.open()
    assert len(await applied(store)) == len(migrations.MIGRATIONS)
    with database_of(store).engine.begin() as connection:
        assert not inspect(connection).has_table("half")


async def test_newer_database_is_refused(store: Store, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.open()
    message = rf"newer Syringa \(its schema has version {len(migrations.MIGRATIONS)}, this Syringa knows 0\)"
    monkeypatch.setattr(migrations, "MIGRATIONS", ())
    async with Store(database) as older:
        for _ in range(2):
            with pytest.raises(StartupError, match=message):
                await older.open()
        with pytest.raises(StartupError):
            await read(older).responses.get(US, "r1")


async def test_concurrent_start_of_several_stores(database: str) -> None:
    stores = [Store(database, lock_timeout=60.0) for _ in range(6)]
    await asyncio.gather(*(store.open() for store in stores))
    assert len(await applied(stores[0])) == len(migrations.MIGRATIONS)
    await asyncio.gather(*(store.close() for store in stores))


OPEN = """
import asyncio, sys
from syringa.store import Store
store = Store(sys.argv[1], lock_timeout=60.0)
asyncio.run(store.open())
"""


def test_concurrent_start_of_several_processes(database: str) -> None:
    command = [sys.executable, "-c", OPEN, database]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
