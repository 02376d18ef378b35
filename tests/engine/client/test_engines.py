from __future__ import annotations

import asyncio
import os
import signal

import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client.engines import ModelEngines
from syringa.engine.client.model_engine import ModelEngine
from syringa.engine.processes.control import AcquireModel, SupervisorRequest
from syringa.errors import EngineUnavailable
from syringa.fleet.status import NodeStatus
from tests.engine.processes.stub_worker import INFO
from tests.engine.processes.supervisor_harness import answer, run_supervisor, specs, until

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
        await until(lambda: server.engines.fleet().nodes == [NodeStatus("local", "ready", replicas=2)])
        assert server.engines.fleet().pools == []
        with pytest.raises(EngineUnavailable, match="no longer configured"):
            server.engines.engine("unknown")
    assert server.status == [0]


async def test_context_of_preloaded_model_is_known_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_supervisor(monkeypatch, specs("fine", config=CONFIG), CONFIG) as server:
        loaded: dict[str, int] = {}
        server.engines.on_loaded = lambda model, info: loaded.update({model: info.max_model_len})
        await until(lambda: loaded)
        assert loaded == {"fine": INFO.max_model_len}


async def test_idle_model_is_unloaded_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0, model_idle=2.0)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        engine = server.engines.engine("fine-2")
        begun = asyncio.Event()
        with server.hold():
            answering = asyncio.create_task(answer(engine, begun=begun))
            await begun.wait()
            first = server.processes()["fine-2"]
            await asyncio.sleep(2.5)  # longer than the idle timeout
            assert server.processes()["fine-2"] == first
        assert await answering == [1, 2, 3]
        await until(lambda: "fine-2" not in server.processes())
        await until(lambda: server.engines.status("fine-2") == "cold")
        assert not engine.ready
        with pytest.raises(EngineUnavailable, match="'fine-2' is not loaded"):
            await engine.stats()
        await until(lambda: len(server.sockets()) == 1)  # its socket is removed
        assert await answer(engine) == [1, 2, 3]
        assert server.processes().get("fine-2") != first  # it may have been idle for long again
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
        assert server.engines.reason(name).startswith(reason)
        assert server.engines.reason("fine") == ""
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
    config = Config(load_timeout=300.0, max_loaded=1)
    async with run_supervisor(monkeypatch, specs("fine", "fine-2", config=config), config) as server:
        engine = server.engines.engine("fine")
        await until(lambda: server.ready and engine.ready)
        begun = asyncio.Event()
        busy = asyncio.create_task(answer(engine, tokens=20_000, begun=begun))  # far longer than the timeout
        await begun.wait()
        other = server.engines.engine("fine-2")
        assert isinstance(other, ModelEngine)
        # The supervisor's is longer, or it might take the reason back at the same time.
        other.replicas._load_timeout = 8.0
        with pytest.raises(EngineUnavailable) as caught:
            await answer(other)
        assert "within 8 seconds: 1 models are loaded, the most allowed" in caught.value.message
        begun.clear()
        await begun.wait()  # it continues to be answered
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_stream_of_killed_worker_goes_on_in_the_restarted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_supervisor(monkeypatch, specs("fine", config=CONFIG), CONFIG) as server:
        moves: list[tuple[str, str, bool]] = []
        server.engines.on_move = lambda *move: moves.append(move)
        engine = server.engines.engine("fine")
        begun = asyncio.Event()
        with server.hold():
            task = asyncio.create_task(answer(engine, tokens=300, begun=begun))
            await begun.wait()
            os.kill(server.processes()["fine"], signal.SIGKILL)
        assert await task == list(range(1, 301))
        assert moves == [("fine", "crash", True)]
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


def test_set_specs_announces_all_models_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for cluster in (False, True):
        config = Config(cluster=cluster, cluster_dir="/nowhere")
        engines = ModelEngines("/nowhere/control.sock", config)
        sent: list[SupervisorRequest] = []
        monkeypatch.setattr(engines, "_send", sent.append)
        models = specs("kept", "second", config=config)
        engines.set_specs(models)
        acquired = [each for each in sent if isinstance(each, AcquireModel)]
        assert all(each.opportunistic for each in acquired)
        assert [(each.name, each.restart) for each in acquired] == [("kept", True), *[("second", False)] * cluster]
        sent.clear()
        engines.set_specs(models)
        assert sent == []


async def test_set_specs_adds_and_removes_models(monkeypatch: pytest.MonkeyPatch) -> None:
    default, second, third = specs("fine", "fine-2", "fine-3", config=CONFIG)
    async with run_supervisor(monkeypatch, [default], CONFIG) as server:
        engines = server.engines
        engines.set_specs([default, second])
        engine = engines.engine("fine-2")
        begun = asyncio.Event()
        with server.hold():
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


async def test_model_is_unloaded_or_kept_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_supervisor(monkeypatch, specs("fine", config=CONFIG), CONFIG) as server:
        engines = server.engines
        await until(lambda: engines.status("fine") == "loaded")
        engines.keep("unknown", 1.0)
        engines.keep("fine", 0.001)
        await until(lambda: engines.status("fine") == "cold")
        assert await answer(engines.engine("fine")) == [1, 2, 3]
        assert engines.idle_timeout("fine") == 0.0  # as configured
        engines.keep("fine", 300.0)
        await until(lambda: engines.idle_timeout("fine") == 300.0)


async def test_shared_worker_stays_as_long_as_one_of_its_models_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = ModelSpec(id="twin", path="fine", idle_seconds=0.001)
    async with run_supervisor(monkeypatch, [*specs("fine", config=CONFIG), twin], CONFIG) as server:
        assert await answer(server.engines.engine("twin")) == [1, 2, 3]
        assert server.engines.idle_timeout("twin") == 0.0


async def test_models_with_equal_options_share_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [*specs("fine", config=CONFIG), ModelSpec(id="twin", path="fine", aliases=("t",))]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        assert await answer(server.engines.engine("twin")) == [1, 2, 3]
        assert len(server.processes()) == 1
        assert server.engines.status("twin") == "loaded"
