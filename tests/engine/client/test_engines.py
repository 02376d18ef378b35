from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.client.engines import MAX_RETRIES, ModelEngine
from syringa.engine.processes.control import AcquireModel, WorkerState
from syringa.engine.processes.suspects import REFUSED, fingerprint
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import EngineUnavailable, RequestSuspected
from syringa.types import EngineDelta
from tests.engine.processes.stub_worker import INFO
from tests.engine.processes.supervisor_harness import answer, request, run_supervisor, specs, until

CONFIG = Config(load_timeout=300.0)


async def test_default_model_is_loaded_at_start_and_others_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = specs("fine", "fine-2", config=CONFIG)
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        loaded: dict[str, int] = {}
        server.engines.on_loaded = lambda model, info: loaded.update({model: info.max_model_len})
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
        assert loaded == {"fine": 1000, "fine-2": 1000}
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            server.engines.engine("unknown")
    assert server.status == [0]


async def test_idle_model_is_unloaded_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0, model_idle=1.0)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        engine = server.engines.engine("fine-2")
        begun = asyncio.Event()
        answering = asyncio.create_task(answer(engine, tokens=300, begun=begun))
        await begun.wait()
        first = server.processes()["fine-2"]
        assert await answering == list(range(1, 301))  # longer than the idle timeout
        await until(lambda: "fine-2" not in server.processes())
        await until(lambda: server.engines.status("fine-2") == "cold")
        assert not engine.ready
        with pytest.raises(EngineUnavailable, match="'fine-2' is not loaded"):
            await engine.stats()
        await until(lambda: len(server.sockets()) == 1)  # its socket is removed
        assert await answer(engine) == [1, 2, 3]
        assert server.processes()["fine-2"] != first
        assert "fine" in server.processes()  # the default model is kept


async def test_models_take_turns_with_max_loaded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for three models of which one fits: all are answered completely."""
    config = Config(load_timeout=300.0, max_loaded=1)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", "fine-3", config=config), config) as server:
        max_processes = 0

        async def watch() -> None:
            nonlocal max_processes
            while True:
                max_processes = max(max_processes, len(server.processes()))
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        names = ["fine", "fine-2", "fine-3"] * 4
        answers = [answer(server.engines.engine(name), f"{name} {index}", 20) for index, name in enumerate(names)]
        assert await asyncio.gather(*answers) == [list(range(1, 21))] * len(names)
        watching.cancel()
        assert max_processes == 1


async def test_busy_model_is_evicted_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that keep a model busy do not block requests for another model for ever."""
    monkeypatch.setattr("syringa.engine.processes.manager.EVICT_BUSY_AFTER_SECONDS", 0.5)
    config = Config(load_timeout=300.0, max_loaded=1)
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
        await until(lambda: served > before)  # it is loaded again
        for client in clients:
            client.cancel()
        assert not [
            each for each in await asyncio.gather(*clients, return_exceptions=True) if isinstance(each, Exception)
        ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "its file is cut short"),
        ("huge", "it needs 9 GiB"),
        ("doomed", "its worker ended with signal SIGKILL"),
    ],
)
async def test_load_failure_is_raised_to_waiting_requests_and_its_reason_is_logged(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_supervisor(monkeypatch, specs("fine", name, config=CONFIG), CONFIG) as server:
        await server.engines.engine("fine").wait_ready()
        with pytest.raises(EngineUnavailable) as caught:
            await answer(server.engines.engine(name))
        assert caught.value.message == f"The model {name!r} cannot be loaded: the log of the server has the reason"
        assert f"model cannot be loaded: model={name} reason={reason!r}"[:-1] in caplog.text
        assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
        assert server.engines.status(name) == "failed"
        with pytest.raises(EngineUnavailable):
            await server.engines.engine(name).wait_ready()
        if name != "huge":  # that one evicts the others first
            assert "fine" in server.processes()
        assert await answer(server.engines.engine("fine")) == [1, 2, 3]


async def test_model_that_only_fits_alone_evicts_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_supervisor(monkeypatch, specs("fine", "crowded", config=CONFIG), CONFIG) as server:
        assert await answer(server.engines.engine("fine")) == [1, 2, 3]
        assert await answer(server.engines.engine("crowded")) == [1, 2, 3]
        assert list(server.processes()) == ["crowded"]


async def test_load_timeout_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=2.0, max_loaded=1)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        engine = server.engines.engine("fine")
        await until(lambda: server.ready and engine.ready)
        begun = asyncio.Event()
        busy = asyncio.create_task(answer(engine, tokens=20_000, begun=begun))  # far longer than the timeout
        await begun.wait()
        with pytest.raises(EngineUnavailable) as caught:
            await answer(server.engines.engine("fine-2"))
        assert "within 2 seconds: 1 models are loaded, the most allowed" in caught.value.message
        begun.clear()
        await begun.wait()  # it continues to be answered
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_killed_worker_fails_its_requests_and_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_default_model_that_cannot_be_loaded_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, message in (
        ("broken", "its file is cut short"),
        ("doomed", "could not be loaded: its worker ended with"),
    ):
        async with run_supervisor(monkeypatch, specs(name, config=CONFIG), CONFIG) as server:
            await until(lambda server=server: server.status)
        assert server.status == [1]
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert message in error


async def test_default_model_without_preload_is_loaded_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [ModelSpec(id="fine", path="fine", preload=False, idle_seconds=0.0)]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        await until(lambda: server.ready == [None])
        assert not server.processes()
        assert await answer(server.engines.engine("fine")) == [1, 2, 3]


async def test_set_specs_adds_and_removes_models(monkeypatch: pytest.MonkeyPatch) -> None:
    default, second, third = specs("fine", "fine-2", "fine-3", config=CONFIG)
    async with run_supervisor(monkeypatch, [default], CONFIG) as server:
        engines = server.engines
        engines.set_specs([default, second])
        engine = engines.engine("fine-2")
        begun = asyncio.Event()
        task = asyncio.create_task(answer(engine, tokens=200, begun=begun))
        await begun.wait()
        engines.set_specs([default, third])
        assert len(await task) == 200  # running requests finish
        await until(lambda: "fine-2" not in server.processes())
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            engines.engine("fine-2")
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            await answer(engine)
        assert await answer(engines.engine("fine-3")) == [1, 2, 3]
        engines.set_specs([default, second])
        assert await answer(engines.engine("fine-2")) == [1, 2, 3]


async def test_preloaded_model_is_loaded_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [*specs("fine", config=CONFIG), ModelSpec(id="b", path="fine-2", preload=True, idle_seconds=0.0)]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        await until(lambda: server.engines.status("b") == "loaded")


async def test_models_with_equal_options_share_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [*specs("fine", config=CONFIG), ModelSpec(id="twin", path="fine", aliases=("t",))]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        assert await answer(server.engines.engine("twin")) == [1, 2, 3]
        assert len(server.processes()) == 1
        assert server.engines.status("twin") == "loaded"


# Workers that retire


@contextlib.asynccontextmanager
async def fake_worker(path: str, handle: Callable[[asyncio.StreamWriter], object]) -> AsyncIterator[None]:
    """Run a worker that is ready, and calls `handle` on the first request."""

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


async def test_request_not_begun_by_retiring_worker_goes_to_next_worker(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = str(Path(folder) / "1"), str(Path(folder) / "2")

        def retire(writer: asyncio.StreamWriter) -> None:
            engine.update(WorkerState("k", "cold", first))

        async with fake_worker(first, retire), fake_worker(second, deltas):
            engine.update(WorkerState("k", "loaded", first))
            task = asyncio.create_task(answer(engine))
            await until(lambda: engine.status == "cold")
            assert not engine.ready
            engine.update(WorkerState("k", "cold"))
            engine.update(WorkerState("k", "loaded", second))
            assert await task == [7]
        await engine.close()


async def test_begun_request_is_not_retried(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")

        def retire(writer: asyncio.StreamWriter) -> None:
            engine.update(WorkerState("k", "cold", path))
            deltas(writer, finish=False)

        async with fake_worker(path, retire):
            engine.update(WorkerState("k", "loaded", path))
            with pytest.raises(EngineUnavailable, match="ended while it was answering"):
                await answer(engine)
        await engine.close()


def crash(engine: ModelEngine, suspects: Mapping[bytes, int]) -> Callable[[asyncio.StreamWriter], None]:
    """Return a handler of a request that ends the worker, as the supervisor reports it."""

    def handle(writer: asyncio.StreamWriter) -> None:
        writer.close()
        engine.suspects = suspects
        engine.update(WorkerState("k", "loading"))

    return handle


async def test_request_not_begun_at_a_crash_goes_to_next_worker(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = str(Path(folder) / "1"), str(Path(folder) / "2")
        async with fake_worker(first, crash(engine, {})), fake_worker(second, deltas):
            engine.update(WorkerState("k", "loaded", first))
            task = asyncio.create_task(answer(engine))
            await until(lambda: engine.status == "loading")
            engine.update(WorkerState("k", "loaded", second))
            assert await task == [7]
        await engine.close()


async def test_request_is_retried_a_limited_number_of_times(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / str(number)) for number in range(MAX_RETRIES + 2)]
        async with contextlib.AsyncExitStack() as workers:
            for path in paths:
                await workers.enter_async_context(fake_worker(path, crash(engine, {})))
            task = asyncio.create_task(answer(engine))
            for path in paths[:-1]:
                assert not task.done()
                engine.update(WorkerState("k", "loaded", path))
                await until(lambda: engine.status == "loading")
            with pytest.raises(EngineUnavailable, match="ended while it was answering"):
                await task
        await engine.close()


@pytest.mark.parametrize(("level", "error"), [(2, EngineUnavailable), (REFUSED, RequestSuspected)])
async def test_request_computed_at_two_crashes_is_not_retried(
    level: int, error: type[Exception], engine: ModelEngine
) -> None:
    suspects = {fingerprint(request("r")): level}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with fake_worker(path, crash(engine, suspects)):
            engine.update(WorkerState("k", "loaded", path))
            with pytest.raises(error) as caught:
                await answer(engine)
        await engine.close()
    assert (caught.type is RequestSuspected) == (level == REFUSED)


async def test_refused_request_does_not_reach_the_worker(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with fake_worker(path, deltas):
            engine.update(WorkerState("k", "loaded", path))
            engine.suspects = {fingerprint(request("r")): REFUSED}
            with pytest.raises(RequestSuspected) as caught:
                await answer(engine, "another id")
            assert (caught.value.status, caught.value.code) == (500, "request_suspected")
            assert await answer(engine, prompt=[9]) == [7]
        await engine.close()


async def test_lost_connection_to_a_living_worker_is_made_again(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with fake_worker(path, deltas):
            for _ in range(2):  # it closes the connection after each request
                engine.update(WorkerState("k", "loaded", path))
                assert await answer(engine) == [7]
                await until(lambda: not engine.ready)
        await engine.close()


async def test_hanging_worker_gets_no_requests(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with fake_worker(path, deltas):
            engine.update(WorkerState("k", "loaded", path))
            await engine.wait_ready()
            engine.update(WorkerState("k", "hanging", path))
            assert not engine.ready
            with pytest.raises(EngineUnavailable):
                await engine.stats()
            task = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.01)
            assert not task.done()
            engine.update(WorkerState("k", "loaded", path))
            assert await task == [7]
        await engine.close()


async def test_worker_that_declines_to_retire_is_used_again(engine: ModelEngine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "1")
        async with fake_worker(path, deltas):
            engine.update(WorkerState("k", "loaded", path))
            await engine.wait_ready()
            engine.update(WorkerState("k", "cold", path))
            task = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.01)
            assert not task.done()
            engine.update(WorkerState("k", "loaded", path))
            assert await task == [7]
        await engine.close()


async def test_close_fails_waiting_requests(engine: ModelEngine) -> None:
    task = asyncio.create_task(engine.wait_ready())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineUnavailable, match="is being stopped"):
        await task
