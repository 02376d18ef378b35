from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import StartupError, StoreUnavailable, SyringaError, Unauthorized
from syringa.service.auth import key_cache as module
from syringa.service.auth.key_cache import ApiKeyCache, usable
from syringa.service.auth.keys import ANONYMOUS, Caller, RateLimits, digest, mint
from syringa.store import ApiKey, Store, migrations
from tests.store.helpers import START, Clock, read, write
from tests.store.postgres import Postgres

DEFAULTS = RateLimits(requests_per_minute=200, tokens_per_minute=1000, concurrent=8)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(database: str, clock: Clock) -> AsyncIterator[Store]:
    async with Store(database, clock=clock) as opened:
        yield opened


@asynccontextmanager
async def running(store: Store, *static: str, **changes: Any) -> AsyncIterator[ApiKeyCache]:
    ring = ApiKeyCache(store, static, DEFAULTS, **changes)
    await ring.start()
    try:
        yield ring
    finally:
        await ring.close()


async def add(store: Store, organization: str = "acme", **changes: Any) -> tuple[str, ApiKey]:
    key, kept = mint(organization, **({"now": START} | changes))
    assert await write(store).keys.create(kept)
    return f"Bearer {key}", kept


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def failure(ring: ApiKeyCache, header: str | bytes | None) -> SyringaError | None:
    try:
        ring.find(header)
    except SyringaError as error:
        return error
    return None


def refused(ring: ApiKeyCache, header: str | bytes | None) -> str:
    """The reason, or nothing."""
    error = failure(ring, header)
    if error is None:
        return ""
    assert isinstance(error, Unauthorized)
    assert (error.status, error.code) == (401, "invalid_api_key")
    return error.message


def unavailable(ring: ApiKeyCache, header: str | None = "Bearer x") -> bool:
    error = failure(ring, header)
    return isinstance(error, StoreUnavailable) and error.status == 503 and bool(error.retry_after)


async def test_a_stored_key(store: Store) -> None:
    header, kept = await add(store, models=["m"], rates=RateLimits(concurrent=2), admin=True)
    other, theirs = await add(store, "other")
    await write(store).organizations.set_limits("acme", requests_per_minute=0, tokens_per_minute=7)
    async with running(store) as ring:
        assert ring.required
        expected = Caller(
            organization="acme",
            key=kept.id,
            admin=True,
            models=frozenset({"m"}),
            rates=RateLimits(requests_per_minute=0, tokens_per_minute=7, concurrent=8),
            key_rates=RateLimits(concurrent=2),
        )
        assert ring.find(header) == expected
        assert ring.find(header.encode()) == expected
        assert ring.find("bearer  " + header.removeprefix("Bearer ") + " ") == expected
        assert ring.find(other) == Caller(organization="other", key=theirs.id, rates=DEFAULTS)


async def test_a_key_of_the_settings(store: Store) -> None:
    header, _ = await add(store)
    async with running(store, "open sesame", "x" * 600) as ring:
        hashed = digest("open sesame")
        expected = Caller(organization=hashed[:16], key=f"config-{hashed[:8]}", rates=DEFAULTS)
        assert ring.find("Bearer open sesame") == expected
        assert ring.find("Bearer " + "x" * 600).organization == digest("x" * 600)[:16]
        assert ring.find(header).organization == "acme"
        assert refused(ring, "Bearer open sesam")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "is needed"),
        ("", "is needed"),
        (b"  ", "is needed"),
        ("Basic abc", "another form"),
        ("sk-syr-abc", "another form"),
        ("Bearer", "malformed"),
        ("Bearer  ", "malformed"),
        ("Bearer ä", "malformed"),
        ("Bearer \udc80", "malformed"),
        (b"Bearer \xff\x00", "malformed"),
        ("Bearer " + "x" * 513, "malformed"),
        ("Bearer " + "x" * 512, "unknown"),
        ("Bearer x y\r\nx-admin: 1", "unknown"),
        ("Bearer sk-syr-" + "a" * 43, "unknown"),
    ],
)
async def test_headers_without_a_key_that_counts(tmp_path: Path, header: str | bytes | None, said: str) -> None:
    async with Store(str(tmp_path / "syringa.db")) as store:
        await add(store)
        async with running(store) as ring:
            reason = refused(ring, header)
            assert said in reason
            assert "abc" not in reason


async def test_an_expired_key_is_refused_from_its_second_on(store: Store, clock: Clock) -> None:
    header, _ = await add(store, expires_at=START + 10)
    async with running(store, clock=clock) as ring:
        clock.now = START + 9.9
        assert ring.find(header).organization == "acme"
        clock.now = START + 10.0
        assert "expired" in refused(ring, header)


async def test_keys_come_and_go_while_it_runs(store: Store, database: str) -> None:
    async with running(store) as ring, Store(database) as elsewhere:
        assert not ring.required
        assert ring.find("Bearer anything") is ring.find(None) is ANONYMOUS
        header, kept = await add(elsewhere)
        await until(lambda: ring.required)
        assert ring.find(header).key == kept.id
        assert "is needed" in refused(ring, None)
        await write(elsewhere).organizations.set_limits("acme", concurrent=1)
        await until(lambda: ring.find(header).rates.concurrent == 1)
        await write(elsewhere).keys.revoke(kept.id)
        await until(lambda: refused(ring, header))
        assert "revoked" in refused(ring, header)
        assert ring.required  # a revoked last key does not open the server


async def test_a_server_whose_keys_are_all_revoked_starts_closed(store: Store) -> None:
    _, kept = await add(store)
    await write(store).keys.revoke(kept.id)
    async with running(store) as ring:
        assert ring.required
        assert refused(ring, None)


REVOKE = """
import asyncio, sys
from syringa.store import Store
async def main():
    async with Store(sys.argv[1]) as store:
        await store.keys.revoke(sys.argv[2])
asyncio.run(main())
"""


async def test_another_process_revokes(store: Store, database: str) -> None:
    header, kept = await add(store)
    async with running(store) as ring:
        ring.find(header)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", REVOKE, database, kept.id)
        assert await process.wait() == 0
        await until(lambda: refused(ring, header))


async def test_nothing_is_opened_for_a_file_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Store(str(tmp_path / "new" / "syringa.db")) as store:
        assert not await usable(store)
        async with running(store) as ring:
            await asyncio.sleep(0.1)
            assert not ring.required
            assert store._database is None
            assert not (tmp_path / "new").exists()
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "syringa.db").touch()  # a full disk leaves this behind
            await asyncio.sleep(0.1)
            assert not ring.required
            async with Store(store.location.place) as elsewhere:
                header, _ = await add(elsewhere)
                await until(lambda: ring.required)
                assert ring.find(header).organization == "acme"
    assert not caplog.records


async def test_a_file_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    async with Store(str(tmp_path / "taken" / "syringa.db")) as store, running(store) as ring:
        await asyncio.sleep(0.1)
        assert not ring.required
        assert ring.find(None) is ANONYMOUS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be made" in caplog.text


async def test_a_file_that_is_no_database_closes_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "syringa.db"
    async with Store(str(file)) as store, running(store, "static") as both, running(store) as ring:
        assert not ring.required
        file.write_text("not a database, " * 100)
        await until(lambda: ring.required and unavailable(both))
        assert unavailable(ring)
        assert unavailable(ring, None)
        assert both.find("Bearer static").key.startswith("config-")
        assert "is needed" in refused(both, None)
        caplog.clear()
        await asyncio.sleep(0.1)
        assert not caplog.records  # told once
        file.unlink()
        await until(lambda: not ring.required)


async def test_a_path_that_may_not_be_looked_at_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "syringa.db"
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path == str(file):
            raise PermissionError
        return real(path, **options)

    async with Store(str(file)) as store:
        monkeypatch.setattr(module.os, "stat", stat)
        monkeypatch.setattr(Store, "revision", away)
        async with running(store) as ring:
            assert unavailable(ring)


async def away(*given: Any) -> Any:
    raise StoreUnavailable("away")


async def test_the_last_copy_stays_in_use(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    header, kept = await add(store)
    async with running(store) as ring:
        with monkeypatch.context() as broken:
            broken.setattr(Store, "revision", away)
            await until(lambda: caplog.records)
            await asyncio.sleep(0.1)
            assert ring.find(header).key == kept.id
            assert refused(ring, "Bearer unknown")
        assert len(caplog.records) == 1
        await write(store).keys.revoke(kept.id)
        await until(lambda: refused(ring, header))


@pytest.mark.parametrize("anew", [False, True])
async def test_a_database_that_is_removed(tmp_path: Path, anew: bool, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "data" / "syringa.db"
    async with Store(str(file)) as store, running(store) as ring:
        header, kept = await add(store)
        await until(lambda: ring.required)
        caplog.clear()
        for each in file.parent.iterdir():
            each.unlink()
        if anew:  # somebody else makes it, and it is empty
            async with Store(str(file)) as elsewhere:
                await elsewhere.open()
        await until(lambda: caplog.records)
        await asyncio.sleep(0.1)
        assert ring.find(header).key == kept.id
        assert ring.required
        told = [record.message for record in caplog.records if record.name == "syringa.service"]
        assert len(told) == len(set(told))  # each thing once, not at each poll
        assert anew or not file.exists()
        async with Store(str(file)) as elsewhere:
            other, _ = await add(elsewhere)
            await until(lambda: not refused(ring, other))
            assert refused(ring, header)  # the new database is the one that counts


async def test_a_server_that_is_away_at_first(postgres: Postgres) -> None:
    async with Store(postgres.new_database()) as store:
        header, kept = await add(store)
        url = store.location.place.replace("+psycopg", "")
    async with Store(url) as store:
        postgres.stop()
        ring = ApiKeyCache(store)
        try:
            await ring.start()
            assert ring.required
            assert unavailable(ring, header)
            assert unavailable(ring, None)
        finally:
            postgres.start()
        await until(lambda: not unavailable(ring, header))
        assert ring.find(header).key == kept.id
        await ring.close()


async def test_a_newer_database_ends_the_start(store: Store, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.open()
    monkeypatch.setattr(migrations, "MIGRATIONS", ())
    async with Store(database) as older:
        with pytest.raises(StartupError, match="newer Syringa"):
            await ApiKeyCache(older).start()


async def test_last_use_is_written_now_and_then(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOUCH_SECONDS", 0.05)
    header, kept = await add(store)
    expired, old = await add(store, expires_at=START + 1)
    async with running(store, "static", clock=clock) as ring:
        clock.now += 5
        ring.find(header)
        ring.find("Bearer static")
        refused(ring, expired)

        for _ in range(3000):
            found = await read(store).keys.get(kept.id)
            assert found is not None
            if found.last_used_at:
                break
            await asyncio.sleep(0.01)
        assert found.last_used_at == START + 5
    unused = await read(store).keys.get(old.id)
    assert unused is not None
    assert unused.last_used_at is None


async def test_last_use_is_written_at_the_end(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    header, kept = await add(store)
    async with running(store, clock=clock) as ring:
        clock.now += 5
        ring.find(header)
        with monkeypatch.context() as broken:
            broken.setattr(type(store.keys), "touch", away)
            with pytest.raises(StoreUnavailable):
                await ring._touch()  # what could not be written is not forgotten
    found = await read(store).keys.get(kept.id)
    assert found is not None
    assert found.last_used_at == START + 5


async def test_a_store_that_is_closed_first_does_no_harm(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "syringa.db"))
    header, _ = await add(store)
    ring = ApiKeyCache(store)
    await ring.start()
    ring.find(header)
    await store.close()
    await ring.close()
    await ApiKeyCache(store).close()  # and one that was never started


async def test_whether_a_store_lets_anybody_in(store: Store, clock: Clock) -> None:
    assert not await usable(store)
    _, kept = await add(store)
    assert await usable(store)
    await write(store).keys.revoke(kept.id)
    assert not await usable(store)
