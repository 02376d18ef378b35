"""Every test of the store runs on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from syringa.store import Store
from tests.store.postgres import Postgres, why_not
from tests.store.things import Clock


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if reason := why_not():
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The setting for an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "data" / "syringa.db")
    url: str = request.getfixturevalue("postgres").new_database()
    return url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(database: str, clock: Clock) -> AsyncIterator[Store]:
    async with Store(database, clock=clock) as opened:
        yield opened
