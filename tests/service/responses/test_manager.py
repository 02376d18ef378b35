from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from syringa.errors import StoreUnavailable
from syringa.service.responses import manager as module
from syringa.service.responses.manager import ResponseManager
from syringa.service.responses.recorder import ResponseRecorder
from syringa.store import ResponseKey, Store
from syringa.store.schema import responses
from tests.client import until
from tests.store.helpers import Clock, read, response, write


@asynccontextmanager
async def managed(
    tmp_path: Path, response_days: int = 30, clock: Callable[[], float] = time.time
) -> AsyncIterator[ResponseManager]:
    async with Store(str(tmp_path / "syringa.db"), clock=clock) as store:
        manager = ResponseManager(store, response_days)
        try:
            yield manager
        finally:
            await manager.close()


async def test_manager_opens_nothing_before_first_use(tmp_path: Path) -> None:
    async with managed(tmp_path) as manager:
        assert not manager._maintenance
    assert manager._store._database is None


async def test_expiry_of_responses(tmp_path: Path) -> None:
    for days, expected in ((30, 1000 + 30 * 86400), (0, None)):
        async with managed(tmp_path, days) as manager:
            assert manager.expiry(1000) == expected


async def test_maintenance_deletes_expired_responses(tmp_path: Path) -> None:
    async with Store(str(tmp_path / "syringa.db")) as store, managed(tmp_path) as manager:
        await write(store).responses.create(response("old", expires_at=5))
        await write(store).responses.create(response("new"))
        await read(manager.store).responses.get("acme", "new")
        for _ in range(6000):
            if await store.expire() == 0 and await read(store).responses.get("acme", "old") is None:
                break
            await asyncio.sleep(0.01)
        assert await read(store).responses.get("acme", "new") is not None


async def test_on_lost_is_called_when_another_process_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    async with managed(tmp_path) as manager, Store(str(tmp_path / "syringa.db")) as other:
        lost = asyncio.Event()
        await write(manager.store).responses.create(response("r", status="in_progress", process=manager.process))
        manager.track(ResponseKey("acme", "r"), lost.set)
        await asyncio.sleep(0.2)
        assert not lost.is_set()
        await write(other).responses.finish("acme", "r", status="cancelled", body="{}")
        await asyncio.wait_for(lost.wait(), 30)


async def test_heartbeat_keeps_response_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.2)
    clock = Clock()
    async with managed(tmp_path, clock=clock) as manager, Store(str(tmp_path / "syringa.db"), clock=clock) as other:

        async def heartbeat_is_current() -> bool:
            query = select(responses.c.heartbeat).where(responses.c.id == "r")
            return await other.read(lambda session: session.responses.connection.execute(query).scalar()) == clock.now

        await write(manager.store).responses.create(response("r", status="in_progress", process=manager.process))
        manager.track(ResponseKey("acme", "r"))
        clock.now += 100
        await until(heartbeat_is_current)
        assert await other.fail_orphans(silent_for=50) == []
        await manager.close()
        clock.now += 100
        assert await other.fail_orphans(silent_for=50) == [ResponseKey("acme", "r")]


async def test_finish_completes_when_caller_is_cancelled(tmp_path: Path) -> None:
    begun, go_on, written = asyncio.Event(), asyncio.Event(), False

    async def write_slowly() -> None:
        nonlocal written
        begun.set()
        await go_on.wait()
        written = True

    async with managed(tmp_path) as manager:
        waiting = asyncio.create_task(manager.finish(ResponseKey("acme", "r"), write_slowly))
        await begun.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        go_on.set()
    assert written


async def test_update_later_logs_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(transaction: object) -> None:
        raise StoreUnavailable("nothing can be stored")

    async with managed(tmp_path) as manager:
        monkeypatch.setattr(manager.store, "write", fail)
        ResponseRecorder(manager, "acme", "resp_1").update_later({"status": "in_progress"})
        (task,) = manager._tasks
        await asyncio.wait([task])
        assert task.exception() is None
    assert "update not stored: response=resp_1 error=nothing can be stored" in caplog.text
