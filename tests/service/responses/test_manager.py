from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from syringa.config import Config
from syringa.errors import ConfigError, StoreUnavailable
from syringa.service.responses import manager as states
from syringa.service.responses.background import BackgroundResponse, BackgroundResponses
from syringa.service.responses.manager import ResponseManager
from syringa.service.responses.recorder import ResponseRecorder
from syringa.store import ResponseKey, Store, StoredEvent
from tests.store.helpers import read, response, write


def config(tmp_path: Path, **settings: int) -> Config:
    return Config(database=str(tmp_path / "syringa.db"), **settings)


async def test_nothing_is_opened_before_it_is_used(tmp_path: Path) -> None:
    state = ResponseManager(config(tmp_path))
    assert not state._upkeep
    await state.close()
    assert state._store._database is None


def test_a_database_that_cannot_be() -> None:
    with pytest.raises(ConfigError):
        ResponseManager(Config(database="mysql://x"))


async def test_what_is_kept_expires(tmp_path: Path) -> None:
    for days, expected in ((30, 1000 + 30 * 86400), (0, None)):
        state = ResponseManager(config(tmp_path, response_days=days))
        assert state.expiry(1000) == expected
        await state.close()


async def test_what_has_expired_is_removed(tmp_path: Path) -> None:
    async with Store(str(tmp_path / "syringa.db")) as store:
        await write(store).responses.create(response("old", expires_at=5))
        await write(store).responses.create(response("new"))
        state = ResponseManager(config(tmp_path))
        await read(state.store).responses.get("acme", "new")
        for _ in range(200):
            if await store.expire() == 0 and await read(store).responses.get("acme", "old") is None:
                break
            await asyncio.sleep(0.01)
        assert await read(store).responses.get("acme", "new") is not None
        await state.close()


async def test_a_response_that_another_process_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BEAT_SECONDS", 0.02)
    state = ResponseManager(config(tmp_path))
    lost = asyncio.Event()
    await write(state.store).responses.create(response("r", status="in_progress", owner=state.owner))
    state.run(ResponseKey("acme", "r"), lost.set)
    await asyncio.sleep(0.2)
    assert not lost.is_set()
    async with Store(str(tmp_path / "syringa.db")) as other:
        await write(other).responses.finish("acme", "r", status="cancelled", body="{}")
        await asyncio.wait_for(lost.wait(), 30)
    await state.close()


async def test_a_heartbeat_keeps_a_response_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BEAT_SECONDS", 0.02)
    state = ResponseManager(config(tmp_path))
    await write(state.store).responses.create(response("r", status="in_progress", owner=state.owner))
    state.run(ResponseKey("acme", "r"))
    async with Store(str(tmp_path / "syringa.db")) as other:
        await asyncio.sleep(2)
        assert await other.fail_orphans(silent_for=1.5) == []
        await state.close()
        await asyncio.sleep(1.7)
        assert await other.fail_orphans(silent_for=1.5) == [ResponseKey("acme", "r")]


async def test_events_that_cannot_be_stored_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.service.responses.background.MAX_UNSTORED", 100)
    state = ResponseManager(config(tmp_path))
    run = BackgroundResponse(ResponseRecorder(state, "acme", "r"))
    for number in range(101):
        run.publish([StoredEvent(number, "{}")])
    with pytest.raises(StoreUnavailable):
        run.publish([StoredEvent(101, "{}")])
    await state.close()


async def test_places_are_held_while_runs_begin() -> None:
    background = BackgroundResponses(1)
    with background.room(), pytest.raises(Exception, match="1 background responses are running"), background.room():
        pass
    with background.room():
        pass


async def test_a_client_that_goes_away_during_the_last_write_does_not_stop_it(tmp_path: Path) -> None:
    state = ResponseManager(config(tmp_path))
    begun, go_on, written = asyncio.Event(), asyncio.Event(), False

    async def write() -> None:
        nonlocal written
        begun.set()
        await go_on.wait()
        written = True

    waiting = asyncio.create_task(state.end(ResponseKey("acme", "r"), write))
    await begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go_on.set()
    await state.close()
    assert written
