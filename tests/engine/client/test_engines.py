from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.client.engines import ModelEngine
from syringa.engine.processes.control import AcquireModel, WorkerState
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import EngineUnavailable
from syringa.types import EngineDelta
from tests.engine.processes.stub_worker import INFO
from tests.engine.processes.supervisor_harness import answer, run_supervisor, specs, until

CONFIG = Config(load_timeout=60.0)


async def test_the_default_is_loaded_at_the_start_and_others_when_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = specs("fine", "fine-2", config=CONFIG)
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        learned: dict[str, int] = {}
        server.engines.on_loaded = lambda model, info: learned.update({model: info.max_model_len})
        engine = server.engines.engine("fine")
        await engine.wait_ready()
        await until(lambda: server.ready)
        assert server.ready == [INFO]
        assert list(server.processes()) == ["fine"]
        assert [server.engines.status(each.id) for each in models] == ["loaded", "cold"]
        other = server.engines.engine("fine-2")
        assert not other.ready
        assert await answer(other) == [1, 2, 3]
        assert other.ready
        assert (await other.stats()).steps == 3
        assert set(server.processes()) == {"fine", "fine-2"}
        assert learned == {"fine": 1000, "fine-2": 1000}
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            server.engines.engine("nobody")
    assert server.status == [0]


async def test_an_unused_model_is_unloaded_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=60.0, model_idle=1.0)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        engine = server.engines.engine("fine-2")
        assert await answer(engine, tokens=300) == list(range(1, 301))  # longer than the idle time: it is in use
        first = server.processes()["fine-2"]
        await until(lambda: "fine-2" not in server.processes())
        await until(lambda: server.engines.status("fine-2") == "cold")
        assert not engine.ready
        with pytest.raises(EngineUnavailable, match="'fine-2' is not loaded"):
            await engine.stats()
        assert len(server.sockets()) == 1  # nothing is left of it
        assert await answer(engine) == [1, 2, 3]
        assert server.processes()["fine-2"] != first
        assert "fine" in server.processes()  # the default one is kept


async def test_models_share_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for three models at once, where one fits: all are answered, and nobody's answer is cut short."""
    config = Config(load_timeout=60.0, max_loaded=1)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", "fine-3", config=config), config) as server:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(server.processes()))
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        names = ["fine", "fine-2", "fine-3"] * 4
        answers = [answer(server.engines.engine(name), f"{name} {index}", 20) for index, name in enumerate(names)]
        assert await asyncio.gather(*answers) == [list(range(1, 21))] * len(names)
        watching.cancel()
        assert most == 1


async def test_a_busy_model_makes_room_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client after the other keeps it busy; who waits for another model is not left waiting for ever."""
    monkeypatch.setattr("syringa.engine.processes.manager.EVICT_BUSY_AFTER_SECONDS", 0.5)
    config = Config(load_timeout=60.0, max_loaded=1)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        served = 0

        async def keep_busy(number: int) -> None:
            nonlocal served
            for index in range(1000):
                assert len(await answer(server.engines.engine("fine"), f"{number} {index}", 50)) == 50
                served += 1

        await server.engines.engine("fine").wait_ready()
        clients = [asyncio.create_task(keep_busy(number)) for number in range(2)]
        await until(lambda: served)
        assert await answer(server.engines.engine("fine-2")) == [1, 2, 3]
        before = served
        await until(lambda: served > before)  # and it comes back
        for client in clients:
            client.cancel()
        assert not [
            each for each in await asyncio.gather(*clients, return_exceptions=True) if isinstance(each, Exception)
        ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "The model 'broken' cannot be loaded: its file is cut short"),
        ("huge", "The model 'huge' cannot be loaded: it needs 9 GiB"),
        ("doomed", "The model 'doomed' cannot be loaded: its worker ended with signal SIGKILL"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_told_to_who_wants_it(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_supervisor(monkeypatch, specs("fine", name, config=CONFIG), CONFIG) as server:
        await server.engines.engine("fine").wait_ready()
        with pytest.raises(EngineUnavailable) as caught:
            await answer(server.engines.engine(name))
        assert caught.value.message.startswith(said)
        assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
        assert server.engines.status(name) == "failed"
        with pytest.raises(EngineUnavailable):
            await server.engines.engine(name).wait_ready()
        if name != "huge":  # that one had the others leave, to be sure
            assert "fine" in server.processes()
        assert await answer(server.engines.engine("fine")) == [1, 2, 3]


async def test_a_model_that_only_fits_alone_has_the_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_supervisor(monkeypatch, specs("fine", "crowded", config=CONFIG), CONFIG) as server:
        assert await answer(server.engines.engine("fine")) == [1, 2, 3]
        assert await answer(server.engines.engine("crowded")) == [1, 2, 3]
        assert list(server.processes()) == ["crowded"]


async def test_a_wait_that_is_too_long_says_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=0.7, max_loaded=1)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        engine = server.engines.engine("fine")
        await until(lambda: server.ready)
        begun = asyncio.Event()
        busy = asyncio.create_task(answer(engine, tokens=400, begun=begun))
        await begun.wait()
        with pytest.raises(EngineUnavailable) as caught:
            await answer(server.engines.engine("fine-2"))
        assert "within 0.7 seconds: 1 models are loaded, the most allowed" in caught.value.message
        assert len(await busy) == 400


async def test_a_killed_worker_is_an_error_for_what_it_had_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_supervisor(monkeypatch, specs("fine", config=CONFIG), CONFIG) as server:
        engine = server.engines.engine("fine")
        begun = asyncio.Event()
        task = asyncio.create_task(answer(engine, tokens=900, begun=begun))
        await begun.wait()
        os.kill(server.processes()["fine"], signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="ended while it was answering"):
            await task
        assert await answer(engine) == [1, 2, 3]
        assert len(server.sockets()) == 1


async def test_a_default_that_cannot_be_loaded_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("broken", "its file is cut short"), ("doomed", "could not be loaded: its worker ended with")):
        async with run_supervisor(monkeypatch, specs(name, config=CONFIG), CONFIG) as server:
            await until(lambda server=server: server.status)
        assert server.status == [1]
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert said in error


async def test_a_default_that_is_loaded_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [ModelSpec(id="fine", path="fine", preload=False, idle_seconds=0.0)]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        await until(lambda: server.ready == [None])
        assert not server.processes()
        assert await answer(server.engines.engine("fine")) == [1, 2, 3]


async def test_models_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    default, second, third = specs("fine", "fine-2", "fine-3", config=CONFIG)
    async with run_supervisor(monkeypatch, [default], CONFIG) as server:
        engines = server.engines
        engines.set_specs([default, second])
        engine = engines.engine("fine-2")
        begun = asyncio.Event()
        task = asyncio.create_task(answer(engine, tokens=200, begun=begun))
        await begun.wait()
        engines.set_specs([default, third])
        assert len(await task) == 200  # what runs ends in peace
        await until(lambda: "fine-2" not in server.processes())
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            engines.engine("fine-2")
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            await answer(engine)
        assert await answer(engines.engine("fine-3")) == [1, 2, 3]
        engines.set_specs([default, second])
        assert await answer(engines.engine("fine-2")) == [1, 2, 3]


async def test_a_preloaded_model_is_there_before_anybody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [*specs("fine", config=CONFIG), ModelSpec(id="b", path="fine-2", preload=True, idle_seconds=0.0)]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        await until(lambda: server.engines.status("b") == "loaded")


async def test_two_models_of_the_same_options_share_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [*specs("fine", config=CONFIG), ModelSpec(id="twin", path="fine", aliases=("t",))]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        assert await answer(server.engines.engine("twin")) == [1, 2, 3]
        assert len(server.processes()) == 1
        assert server.engines.status("twin") == "loaded"


# A worker that leaves


@contextlib.asynccontextmanager
async def stub(path: str, handle: Callable[[asyncio.StreamWriter], object]) -> AsyncIterator[None]:
    """A worker that is ready, and then does `handle` with the first request."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.frame(protocol.Ready(INFO)))
        await reader.readexactly(4)
        handle(writer)
        writer.close()

    async with await asyncio.start_unix_server(connected, path):
        yield


def deltas(writer: asyncio.StreamWriter, *, finish: bool = True) -> None:
    writer.write(protocol.frame(protocol.Deltas([EngineDelta("1", 0, [7], finish="stop" if finish else None)])))


@pytest.fixture
def engine() -> ModelEngine:
    return ModelEngine(
        "m", AcquireModel(WorkerOptions(socket="", model="m")), lambda message: None, 5.0, lambda info: None
    )


async def test_a_request_that_came_too_late_goes_to_the_next_worker(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = str(Path(folder) / "1"), str(Path(folder) / "2")

        def leave(writer: asyncio.StreamWriter) -> None:
            engine.update(WorkerState("k", "cold", first))

        async with stub(first, leave), stub(second, deltas):
            engine.update(WorkerState("k", "loaded", first))
            task = asyncio.create_task(answer(engine))
            await until(lambda: engine.status == "cold")
            assert not engine.ready
            engine.update(WorkerState("k", "cold"))
            engine.update(WorkerState("k", "loaded", second))
            assert await task == [7]
        await engine.close()


async def test_one_that_was_begun_is_not_begun_again(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")

        def leave(writer: asyncio.StreamWriter) -> None:
            engine.update(WorkerState("k", "cold", path))
            deltas(writer, finish=False)

        async with stub(path, leave):
            engine.update(WorkerState("k", "loaded", path))
            with pytest.raises(EngineUnavailable, match="ended while it was answering"):
                await answer(engine)
        await engine.close()


async def test_one_that_a_crash_took_is_not_tried_again(engine: ModelEngine) -> None:
    """It may have been the cause of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with stub(path, lambda writer: None):
            engine.update(WorkerState("k", "loaded", path))
            with pytest.raises(EngineUnavailable, match="ended while it was answering"):
                await answer(engine)
        await engine.close()


async def test_a_worker_that_stays_after_all(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with stub(path, deltas):
            engine.update(WorkerState("k", "loaded", path))
            await engine.wait_ready()
            engine.update(WorkerState("k", "cold", path))
            task = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.01)
            assert not task.done()
            engine.update(WorkerState("k", "loaded", path))
            assert await task == [7]
        await engine.close()


async def test_who_waits_when_it_is_closed_is_told(engine: ModelEngine) -> None:
    task = asyncio.create_task(engine.wait_ready())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineUnavailable, match="is being stopped"):
        await task
