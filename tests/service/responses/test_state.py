from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from syringa.config import Config
from syringa.errors import ConfigError, StoreUnavailable
from syringa.service.responses import state as states
from syringa.service.responses.background import Background, Run
from syringa.service.responses.record import Record
from syringa.service.responses.state import State
from syringa.store import Event, Running, Store
from tests.store.things import response


def config(tmp_path: Path, **settings: int) -> Config:
    return Config(database=str(tmp_path / "syringa.db"), **settings)


async def test_nothing_is_opened_before_it_is_used(tmp_path: Path) -> None:
    state = State(config(tmp_path))
    assert not state._upkeep
    await state.close()
    assert state._store._database is None


def test_a_database_that_cannot_be() -> None:
    with pytest.raises(ConfigError):
        State(Config(database="mysql://x"))


async def test_what_is_kept_expires(tmp_path: Path) -> None:
    for days, expected in ((30, 1000 + 30 * 86400), (0, None)):
        state = State(config(tmp_path, response_days=days))
        assert state.expiry(1000) == expected
        await state.close()


async def test_what_has_expired_is_removed(tmp_path: Path) -> None:
    async with Store(str(tmp_path / "syringa.db")) as store:
        await store.create_response(response("old", expires_at=5))
        await store.create_response(response("new"))
        state = State(config(tmp_path))
        await state.store.get_response("acme", "new")
        for _ in range(200):
            if await store.expire() == 0 and await store.get_response("acme", "old") is None:
                break
            await asyncio.sleep(0.01)
        assert await store.get_response("acme", "new") is not None
        await state.close()


async def test_a_response_that_another_process_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BEAT_SECONDS", 0.02)
    state = State(config(tmp_path))
    lost = asyncio.Event()
    await state.store.create_response(response("r", status="in_progress", owner=state.owner))
    state.run(Running("acme", "r"), lost.set)
    await asyncio.sleep(0.2)
    assert not lost.is_set()
    async with Store(str(tmp_path / "syringa.db")) as other:
        await other.finish_response("acme", "r", status="cancelled", body="{}")
        await asyncio.wait_for(lost.wait(), 30)
    await state.close()


async def test_a_heartbeat_keeps_a_response_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BEAT_SECONDS", 0.02)
    state = State(config(tmp_path))
    await state.store.create_response(response("r", status="in_progress", owner=state.owner))
    state.run(Running("acme", "r"))
    async with Store(str(tmp_path / "syringa.db")) as other:
        await asyncio.sleep(2)
        assert await other.fail_orphans(silent_for=1.5) == []
        await state.close()
        await asyncio.sleep(1.7)
        assert await other.fail_orphans(silent_for=1.5) == [Running("acme", "r")]


async def test_events_that_cannot_be_stored_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.service.responses.background.MAX_UNSTORED", 100)
    state = State(config(tmp_path))
    run = Run(Record(state, "acme", "r"))
    for number in range(101):
        run.publish([Event(number, "{}")])
    with pytest.raises(StoreUnavailable):
        run.publish([Event(101, "{}")])
    await state.close()


async def test_places_are_held_while_runs_begin() -> None:
    background = Background(1)
    with background.room(), pytest.raises(Exception, match="1 background responses are running"), background.room():
        pass
    with background.room():
        pass


async def test_a_client_that_goes_away_during_the_last_write_does_not_stop_it(tmp_path: Path) -> None:
    state = State(config(tmp_path))
    begun, go_on, written = asyncio.Event(), asyncio.Event(), False

    async def write() -> None:
        nonlocal written
        begun.set()
        await go_on.wait()
        written = True

    waiting = asyncio.create_task(state.end(Running("acme", "r"), write))
    await begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go_on.set()
    await state.close()
    assert written
