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
from syringa.service import store_poller
from syringa.service.auth import key_cache as module
from syringa.service.auth.key_cache import ApiKeyCache, has_valid_key
from syringa.service.auth.keys import ANONYMOUS, Caller, RateLimits, create_api_key, digest
from syringa.service.store_poller import StorePoller
from syringa.store import ApiKey, Store, migrations
from tests.store.helpers import START, Clock, read, write
from tests.store.postgres import Postgres

DEFAULTS = RateLimits(requests_per_minute=200, tokens_per_minute=1000, concurrent=8)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_poller, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "UNKNOWN_KEY_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 60.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(database: str, clock: Clock) -> AsyncIterator[Store]:
    async with Store(database, clock=clock) as opened:
        yield opened


@asynccontextmanager
async def running(store: Store, *static: str, **changes: Any) -> AsyncIterator[ApiKeyCache]:
    cache = ApiKeyCache(store, static, DEFAULTS, **changes)
    await cache.start()
    poller = StorePoller(store, cache.refresh)
    poller.start()
    try:
        yield cache
    finally:
        await poller.close()
        await cache.close()


async def add(store: Store, organization: str = "acme", **changes: Any) -> tuple[str, ApiKey]:
    key, record = create_api_key(organization, **({"now": START} | changes))
    assert await write(store).keys.create(record)
    return f"Bearer {key}", record


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


def failure(cache: ApiKeyCache, header: str | bytes | None) -> SyringaError | None:
    try:
        cache.authenticate(header)
    except SyringaError as error:
        return error
    return None


def refused(cache: ApiKeyCache, header: str | bytes | None) -> str:
    """Return the reason, or an empty string."""
    error = failure(cache, header)
    if error is None:
        return ""
    assert isinstance(error, Unauthorized)
    assert (error.status, error.code) == (401, "invalid_api_key")
    return error.message


def unavailable(cache: ApiKeyCache, header: str | None = "Bearer x") -> bool:
    error = failure(cache, header)
    return isinstance(error, StoreUnavailable) and error.status == 503 and bool(error.retry_after)


async def test_authenticate_stored_key(store: Store) -> None:
    header, record = await add(store, models=["m"], rates=RateLimits(concurrent=2), admin=True)
    other, theirs = await add(store, "other")
    await write(store).organizations.set_limits("acme", {"requests_per_minute": 0, "tokens_per_minute": 7})
    async with running(store) as cache:
        assert cache.required
        expected = Caller(
            organization="acme",
            key=record.id,
            admin=True,
            models=frozenset({"m"}),
            rates=RateLimits(requests_per_minute=0, tokens_per_minute=7, concurrent=8),
            key_rates=RateLimits(concurrent=2),
        )
        assert cache.authenticate(header) == expected
        assert cache.authenticate(header.encode()) == expected
        assert cache.authenticate("bearer  " + header.removeprefix("Bearer ") + " ") == expected
        assert cache.authenticate(other) == Caller(organization="other", key=theirs.id, rates=DEFAULTS)


async def test_authenticate_key_of_configuration(store: Store) -> None:
    header, _ = await add(store)
    async with running(store, "open sesame", "x" * 600) as cache:
        hashed = digest("open sesame")
        expected = Caller(organization=hashed[:16], key=f"config-{hashed[:8]}", rates=DEFAULTS)
        assert cache.authenticate("Bearer open sesame") == expected
        assert cache.authenticate("Bearer " + "x" * 600).organization == digest("x" * 600)[:16]
        assert cache.authenticate(header).organization == "acme"
        assert refused(cache, "Bearer open sesam")


@pytest.mark.parametrize(
    ("header", "message"),
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
async def test_invalid_headers_are_refused(tmp_path: Path, header: str | bytes | None, message: str) -> None:
    async with Store(str(tmp_path / "syringa.db")) as store:
        await add(store)
        async with running(store) as cache:
            reason = refused(cache, header)
            assert message in reason
            assert "abc" not in reason


async def test_expired_key_is_refused(store: Store, clock: Clock) -> None:
    header, _ = await add(store, expires_at=START + 10)
    async with running(store, clock=clock) as cache:
        clock.now = START + 9.9
        assert cache.authenticate(header).organization == "acme"
        clock.now = START + 10.0
        assert "expired" in refused(cache, header)


async def test_changes_of_keys_are_noticed(store: Store, database: str) -> None:
    async with running(store) as cache, Store(database) as elsewhere:
        assert not cache.required
        assert cache.authenticate("Bearer anything") is cache.authenticate(None) is ANONYMOUS
        header, record = await add(elsewhere)
        await until(lambda: cache.required)
        assert cache.authenticate(header).key == record.id
        assert "is needed" in refused(cache, None)
        await write(elsewhere).organizations.set_limits("acme", {"concurrent": 1})
        await until(lambda: cache.authenticate(header).rates.concurrent == 1)
        await write(elsewhere).keys.revoke(record.id)
        await until(lambda: refused(cache, header))
        assert "revoked" in refused(cache, header)
        assert cache.required  # revoking the last key does not open the server


async def test_key_is_required_when_all_are_revoked(store: Store) -> None:
    _, record = await add(store)
    await write(store).keys.revoke(record.id)
    async with running(store) as cache:
        assert cache.required
        assert refused(cache, None)


REVOKE = """
import asyncio, sys
from syringa.store import Store
async def main():
    async with Store(sys.argv[1]) as store:
        await store.write(lambda session: session.keys.revoke(sys.argv[2]))
asyncio.run(main())
"""


async def test_revocation_by_another_process_is_noticed(store: Store, database: str) -> None:
    header, record = await add(store)
    async with running(store) as cache:
        cache.authenticate(header)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", REVOKE, database, record.id)
        assert await process.wait() == 0
        await until(lambda: refused(cache, header))


async def test_missing_database_is_not_created(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Store(str(tmp_path / "new" / "syringa.db")) as store:
        assert not await has_valid_key(store)
        async with running(store) as cache:
            await asyncio.sleep(0.1)
            assert not cache.required
            assert store._database is None
            assert not (tmp_path / "new").exists()
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "syringa.db").touch()  # as a full disk leaves it behind
            await asyncio.sleep(0.1)
            assert not cache.required
            async with Store(store.location.target) as elsewhere:
                header, _ = await add(elsewhere)
                await until(lambda: cache.required)
                assert cache.authenticate(header).organization == "acme"
    assert not caplog.records


async def test_database_that_cannot_be_created_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    async with Store(str(tmp_path / "taken" / "syringa.db")) as store, running(store) as cache:
        await until(lambda: caplog.records)
        await asyncio.sleep(0.1)
        assert not cache.required
        assert cache.authenticate(None) is ANONYMOUS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be created" in caplog.text


async def test_invalid_database_refuses_stored_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "syringa.db"
    async with Store(str(file)) as store, running(store, "static") as both, running(store) as cache:
        assert not cache.required
        file.write_text("not a database, " * 100)
        await until(lambda: cache.required and unavailable(both))
        assert unavailable(cache)
        assert unavailable(cache, None)
        assert both.authenticate("Bearer static").key.startswith("config-")
        assert "is needed" in refused(both, None)
        caplog.clear()
        await asyncio.sleep(0.1)
        assert not caplog.records  # logged once
        file.unlink()
        await until(lambda: not cache.required)


async def test_unreadable_path_counts_as_existing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "syringa.db"
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path == str(file):
            raise PermissionError
        return real(path, **options)

    async with Store(str(file)) as store:
        monkeypatch.setattr(os, "stat", stat)
        monkeypatch.setattr(Store, "poll", unavailable_store)
        async with running(store) as cache:
            assert unavailable(cache)


async def unavailable_store(*given: Any) -> Any:
    raise StoreUnavailable("unavailable")


async def test_cached_keys_stay_valid_while_store_is_unavailable(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    header, record = await add(store)
    async with running(store) as cache:
        with monkeypatch.context() as broken:
            broken.setattr(Store, "poll", unavailable_store)
            await until(lambda: caplog.records)
            await asyncio.sleep(0.1)
            assert cache.authenticate(header).key == record.id
            assert refused(cache, "Bearer unknown")
        assert len(caplog.records) == 1
        await write(store).keys.revoke(record.id)
        await until(lambda: refused(cache, header))


@pytest.mark.parametrize("recreated", [False, True])
async def test_removed_database_does_not_open_server(
    tmp_path: Path, recreated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "data" / "syringa.db"
    async with Store(str(file)) as store, running(store) as cache:
        header, record = await add(store)
        await until(lambda: cache.required)
        caplog.clear()
        for each in file.parent.iterdir():
            each.unlink(missing_ok=True)  # the poller closes its connection meanwhile, which removes the log
        if recreated:  # another process creates an empty one
            async with Store(str(file)) as elsewhere:
                await elsewhere.open()
        await until(lambda: caplog.records)
        await asyncio.sleep(0.1)
        assert cache.authenticate(header).key == record.id
        assert cache.required
        logged = [record.message for record in caplog.records if record.name == "syringa.service"]
        assert len(logged) == len(set(logged))  # once, not at each poll
        assert recreated or not file.exists()
        async with Store(str(file)) as elsewhere:
            other, _ = await add(elsewhere)
            await until(lambda: not refused(cache, other))
            assert refused(cache, header)  # the new database counts


async def test_unavailable_database_at_start_refuses_all_keys(postgres: Postgres) -> None:
    async with Store(postgres.new_database()) as store:
        header, record = await add(store)
        url = store.location.target.replace("+psycopg", "")
    async with Store(url) as store:
        postgres.stop()
        cache = ApiKeyCache(store)
        try:
            await cache.start()
            assert cache.required
            assert unavailable(cache, header)
            assert unavailable(cache, None)
        finally:
            postgres.start()
        poller = StorePoller(store, cache.refresh)
        poller.start()
        await until(lambda: not unavailable(cache, header))
        assert cache.authenticate(header).key == record.id
        await poller.close()
        await cache.close()


async def test_start_fails_for_newer_database(store: Store, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.open()
    monkeypatch.setattr(migrations, "MIGRATIONS", ())
    async with Store(database) as older:
        with pytest.raises(StartupError, match="newer Syringa"):
            await ApiKeyCache(older).start()


async def test_last_use_is_written_periodically(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_USED_SECONDS", 0.05)
    header, record = await add(store)
    expired, old = await add(store, expires_at=START + 1)
    async with running(store, "static", clock=clock) as cache:
        clock.now += 5
        cache.authenticate(header)
        cache.authenticate("Bearer static")
        refused(cache, expired)

        for _ in range(6000):
            found = await read(store).keys.get(record.id)
            assert found is not None
            if found.last_used_at:
                break
            await asyncio.sleep(0.01)
        assert found.last_used_at == START + 5
    unused = await read(store).keys.get(old.id)
    assert unused is not None
    assert unused.last_used_at is None


async def test_last_use_is_written_at_close(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    header, record = await add(store)
    async with running(store, clock=clock) as cache:
        clock.now += 5
        cache.authenticate(header)
        with monkeypatch.context() as broken:
            broken.setattr(Store, "write", unavailable_store)
            with pytest.raises(StoreUnavailable):
                await cache._write_last_used()  # a failed write is repeated later
    found = await read(store).keys.get(record.id)
    assert found is not None
    assert found.last_used_at == START + 5


async def test_close_after_store_was_closed(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "syringa.db"))
    header, _ = await add(store)
    cache = ApiKeyCache(store)
    await cache.start()
    cache.authenticate(header)
    await store.close()
    await cache.close()
    await ApiKeyCache(store).close()  # a cache that was never started


async def test_has_valid_key(store: Store, clock: Clock) -> None:
    assert not await has_valid_key(store)
    _, record = await add(store)
    assert await has_valid_key(store)
    await write(store).keys.revoke(record.id)
    assert not await has_valid_key(store)


async def test_key_cache_finds_a_new_key_without_waiting_for_the_poll(store: Store) -> None:
    await add(store)
    cache = ApiKeyCache(store)
    await cache.start()
    header, record = await add(store, "new")
    with pytest.raises(module.UnknownKey):
        cache.authenticate(header)
    assert (await cache.authenticate_new(header)).key == record.id
    await cache.close()


async def test_unknown_keys_share_refreshes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await add(store)
    cache = ApiKeyCache(store)
    await cache.start()
    refreshes: list[object] = []
    refresh = cache.refresh

    async def count_and_refresh(revisions: Any) -> None:
        refreshes.append(revisions)
        await refresh(revisions)

    monkeypatch.setattr(cache, "refresh", count_and_refresh)
    bogus = [f"Bearer {create_api_key('acme', now=START)[0]}" for _ in range(50)]
    found = await asyncio.gather(*(cache.authenticate_new(header) for header in bogus), return_exceptions=True)
    assert all(isinstance(each, Unauthorized) for each in found)
    assert len(refreshes) == 1
    await cache.close()


async def test_key_of_another_form_is_refused_without_a_refresh(store: Store) -> None:
    await add(store)
    cache = ApiKeyCache(store)
    await cache.start()
    for header in ("Bearer x", "Bearer sk-syr-x", "Bearer sk-" + "x" * 47):
        with pytest.raises(Unauthorized) as raised:
            cache.authenticate(header)
        assert type(raised.value) is Unauthorized
    await cache.close()


async def test_key_cache_reports_keys_that_became_invalid(store: Store, clock: Clock) -> None:
    cache = ApiKeyCache(store, ["static"], clock=clock)
    assert cache.check(Caller(organization="acme", key="key_unread")) is None  # the store was never read
    lasting, record = await add(store)
    expiring, _ = await add(store, expires_at=START + 10)
    await cache.start()
    callers = [cache.authenticate(header) for header in (lasting, expiring, "Bearer static")] + [ANONYMOUS]
    assert [cache.check(caller) for caller in callers] == [None] * 4
    clock.now += 10
    await write(store).keys.revoke(record.id)
    await cache.refresh(store_poller.StoreRevisions(store))
    messages = [error.message if error else None for error in map(cache.check, callers)]
    assert messages == ["The API key was revoked.", "The API key has expired.", None, None]
    await cache.close()


async def test_key_cache_knows_whether_there_is_one_organization(store: Store) -> None:
    cache = ApiKeyCache(store, ["static"])
    assert cache.single_organization
    await add(store, "acme")
    await cache.start()
    assert not cache.single_organization
    await cache.close()
    only_stored = ApiKeyCache(store)
    await only_stored.start()
    assert only_stored.single_organization
    await only_stored.close()
