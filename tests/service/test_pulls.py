from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import FailedDependency
from syringa.service import pulls
from syringa.service.pulls import OnFile, PulledFile, PullManager, decode_files
from syringa.service.responses import process_identity
from syringa.store import Store, StoredPull
from tests.store.helpers import Clock, read, write

SIZE = 1000


class Downloads:
    """Downloads that go on when they are told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.added: list[tuple[str, str]] = []
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def download(self, model: str, on_file: OnFile) -> None:
        self.begun.append(model)
        on_file("a.gguf", SIZE, 100)
        on_file("a.gguf", SIZE, 400)
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        on_file("a.gguf", SIZE, SIZE)

    async def measure(self, model: str) -> int | None:
        return 2 * SIZE

    async def add(self, id: str, source: str) -> None:
        self.added.append((id, source))

    def manager(self, store: Store, clock: Clock, process: str = "here") -> PullManager:
        return PullManager(store, process, download=self.download, measure=self.measure, add=self.add, clock=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(pulls, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(pulls, "CANCEL_SECONDS", 60.0)
    async with Store(str(tmp_path / "syringa.db"), clock=clock) as opened:
        yield opened


async def ended(manager: PullManager, id: str) -> StoredPull:
    async with asyncio.timeout(60):
        while True:
            found = await manager.get(id)
            assert found is not None
            if found.status != "running":
                return found
            await asyncio.sleep(0.01)


async def test_pull_reports_its_progress_and_adds_the_model(store: Store, clock: Clock) -> None:
    downloads = Downloads()
    manager, other = downloads.manager(store, clock), downloads.manager(store, clock, "there")
    begun = await manager.start("org/model", "mine")
    assert (begun.status, begun.stage) == ("running", "resolving")
    while True:
        (found,) = await other.all()
        if found.files != "[]":
            break
        await asyncio.sleep(0.01)
    assert decode_files(found.files) == [PulledFile(name="a.gguf", bytes=SIZE, completed_bytes=400)]
    assert (found.id, found.stage, found.total_bytes) == (begun.id, "downloading", 2 * SIZE)
    assert (await other.start("org/model", "mine")).id == begun.id
    assert downloads.begun == ["org/model"]
    downloads.go_on.set()
    done = await ended(manager, begun.id)
    assert (done.status, done.stage, done.error, done.ended_at) == ("completed", None, None, int(clock.now))
    assert decode_files(done.files)[0].completed_bytes == SIZE
    assert downloads.added == [("mine", "org/model")]


@pytest.mark.parametrize("is_owner", [True, False])
async def test_pull_is_cancelled_by_any_process_and_then_forgotten(store: Store, clock: Clock, is_owner: bool) -> None:
    downloads = Downloads()
    owner, other = downloads.manager(store, clock), downloads.manager(store, clock, "there")
    manager = owner if is_owner else other
    begun = await owner.start("m", "m")
    found = await manager.end(begun.id)
    assert found is not None
    assert found.status == "cancelled" or not is_owner
    assert (await ended(owner, begun.id)).status == "cancelled"
    again = await owner.start("m", "m")
    assert again.id != begun.id
    assert (await manager.end(begun.id)) is not None
    assert await manager.get(begun.id) is None
    assert await manager.end(begun.id) is None
    await owner.end(again.id)
    assert downloads.added == []


@pytest.mark.parametrize(
    ("error", "message"),
    [(FailedDependency("The Hub is away."), "The Hub is away."), (ValueError("x"), "The download failed: see the")],
)
async def test_failed_pull_says_why(store: Store, clock: Clock, error: Exception, message: str) -> None:
    downloads = Downloads()
    downloads.error = error
    downloads.go_on.set()
    manager = downloads.manager(store, clock)
    found = await ended(manager, (await manager.start("m", "m")).id)
    assert found.status == "failed"
    assert (found.error or "").startswith(message)


async def test_stopped_server_ends_its_pulls(store: Store, clock: Clock) -> None:
    manager = Downloads().manager(store, clock)
    begun = await manager.start("m", "m")
    manager.stop()
    found = await ended(manager, begun.id)
    assert (found.status, "was stopped" in (found.error or "")) == ("failed", True)


async def test_pull_of_a_process_that_is_gone_has_failed(store: Store, clock: Clock) -> None:
    manager = Downloads().manager(store, clock)
    own = process_identity.new_identity().split("/")
    values: dict[str, Any] = {"model": "m", "serve_as": "m", "created_at": int(clock.now), "updated_at": clock.now}
    dead = StoredPull(id="dead", process="/".join([own[0], "1", "0", "x"]), **values)
    silent = StoredPull(id="silent", process="elsewhere/1/2/3", **(values | {"model": "n"}))
    for each in (dead, silent):
        await write(store).pulls.create(each)
    assert {each.id: each.status for each in await manager.all()} == {"dead": "failed", "silent": "running"}
    clock.now += pulls.SILENT_SECONDS + 1
    assert {each.status for each in await manager.all()} == {"failed"}
    assert (await manager.start("n", "m")).id != "silent"
    manager.stop()


async def test_pulls_are_listed_for_a_day(store: Store, clock: Clock) -> None:
    downloads = Downloads()
    downloads.go_on.set()
    manager = downloads.manager(store, clock)
    begun = await manager.start("m", "m")
    await ended(manager, begun.id)
    clock.now += pulls.KEEP_SECONDS + 1
    assert await manager.all() == []
    await ended(manager, (await manager.start("n", "n")).id)
    assert [each.model for each in await read(store).pulls.all()] == ["n"]


async def test_list_creates_no_database(store: Store, clock: Clock) -> None:
    manager = Downloads().manager(store, clock)
    assert await manager.all() == []
    assert await manager.get("x") is None
    assert await manager.end("x") is None
    assert store.location.is_empty()


async def test_speed_does_not_count_what_was_there_before() -> None:
    progress = pulls._Progress()
    progress.on_file("a", SIZE, 700)  # an earlier pull has left them
    assert progress.speed(1.0) is None
    progress.on_file("a", SIZE, 900)
    assert progress.speed(3.0) == 100.0
    assert progress.values()["total_bytes"] == SIZE


async def test_speed_is_that_of_the_last_seconds() -> None:
    progress = pulls._Progress()
    progress.on_file("a", SIZE, 0)
    speeds = []
    for second in range(25):  # 100 bytes arrive every other second until 12, then nothing does
        progress.on_file("a", SIZE, min(second, 12) // 2 * 100)
        speeds.append(progress.speed(float(second)))
    assert speeds[9:13] == [44.4, 50.0, 50.0, 50.0]
    assert speeds[20:] == [10.0, 10.0, 0.0, 0.0, 0.0]
