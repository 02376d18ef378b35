"""Workers that hang and requests that crash them, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client.model_engine import ModelEngine
from syringa.engine.processes.control import WorkerState
from syringa.errors import RequestSuspected
from tests.engine.processes.faulty_worker import CRASH_TOKEN, LATE_CRASH_TOKEN
from tests.engine.processes.stub_worker import CRASH, HANG_ONCE
from tests.engine.processes.supervisor_harness import answer, run_supervisor, specs, until


@pytest.mark.slow
async def test_hung_step_is_ended_and_waiting_request_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0, step_timeout=4.0)
    async with run_supervisor(monkeypatch, specs("fine", config=config), config) as server:
        engine = server.engines.engine("fine")
        await engine.wait_ready()
        worker = server.processes()["fine"]
        hanging = asyncio.create_task(answer(engine, "a", prompt=[HANG_ONCE, 5]))
        await until(lambda: (server.folder / "hung").exists())
        waiting = asyncio.create_task(answer(engine, "b"))
        await until(lambda: server.engines.worker_counts("fine").hangs)
        async with asyncio.timeout(240):
            assert await hanging == [HANG_ONCE, 5]
            assert await waiting == [1, 2, 3]
        assert min(server.engines.worker_counts("fine")) >= 1
        assert server.processes()["fine"] != worker
        (server.folder / "hung").unlink()


@pytest.mark.slow
async def test_stopped_worker_is_killed_and_its_requests_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0, heartbeat_timeout=3.0)
    async with run_supervisor(monkeypatch, specs("fine", config=config), config) as server:
        engine = server.engines.engine("fine")
        assert isinstance(engine, ModelEngine)
        await engine.wait_ready()
        ready_while_hanging: list[bool] = []
        update = engine.update

        def record(state: WorkerState) -> None:
            update(state)
            if state.status == "hanging":  # which it is for seconds only
                ready_while_hanging.append(engine.ready)

        monkeypatch.setattr(engine, "update", record)
        begun = asyncio.Event()
        with server.hold():
            streaming = asyncio.create_task(answer(engine, "a", tokens=300, begun=begun))
            await begun.wait()
            os.kill(server.processes()["fine"], signal.SIGSTOP)
            waiting = asyncio.create_task(answer(engine, "b"))
            await until(lambda: ready_while_hanging)
        assert not any(ready_while_hanging)
        late = asyncio.create_task(answer(engine, "c"))
        async with asyncio.timeout(240):
            assert await streaming == list(range(1, 301))
            assert [await waiting, await late] == [[1, 2, 3]] * 2
        assert min(server.engines.worker_counts("fine")) >= 1


async def test_worker_that_is_stopped_for_a_moment_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0, heartbeat_timeout=0.0, step_timeout=60.0)
    async with run_supervisor(monkeypatch, specs("fine", config=config), config) as server:
        engine = server.engines.engine("fine")
        await engine.wait_ready()
        worker = server.processes()["fine"]
        os.kill(worker, signal.SIGSTOP)
        waiting = asyncio.create_task(answer(engine))
        await asyncio.sleep(0.2)
        os.kill(worker, signal.SIGCONT)
        async with asyncio.timeout(240):
            assert await waiting == [1, 2, 3]
        assert server.processes() == {"fine": worker}


async def test_request_that_crashes_the_worker_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0)
    async with run_supervisor(monkeypatch, specs("fine", config=config), config) as server:
        engine = server.engines.engine("fine")
        async with asyncio.timeout(240):
            with pytest.raises(RequestSuspected):
                await answer(engine, "a", prompt=[CRASH, 1])
            assert server.engines.worker_counts("fine").crashes == 2
            with pytest.raises(RequestSuspected):
                await answer(engine, "b", prompt=[CRASH, 1])  # the client sends it again
            assert await answer(engine, "c") == [1, 2, 3]
        assert server.engines.worker_counts("fine").crashes == 2


async def test_stream_that_crashes_the_worker_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0)
    async with run_supervisor(monkeypatch, specs("fine", config=config), config) as server:
        engine = server.engines.engine("fine")
        async with asyncio.timeout(240):
            with pytest.raises(RequestSuspected):
                await answer(engine, "a", prompt=[1, 2, CRASH])
            with pytest.raises(RequestSuspected):
                await answer(engine, "b", prompt=[1, 2, CRASH])
            assert await answer(engine, "c") == [1, 2, 3]
        assert server.engines.worker_counts("fine").crashes == 2


async def test_request_killed_with_its_worker_once_is_answered_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(load_timeout=300.0)
    async with run_supervisor(monkeypatch, specs("fine", config=config), config) as server:
        engine = server.engines.engine("fine")
        suspects = server.engines._suspects
        for _ in range(2):  # an operator kills the worker each time
            begun = asyncio.Event()
            with server.hold():
                task = asyncio.create_task(answer(engine, "a", tokens=100, begun=begun))
                await begun.wait()
                os.kill(server.processes()["fine"], signal.SIGKILL)
                await until(lambda: any(suspects.values()))
            async with asyncio.timeout(240):
                assert await task == list(range(1, 101))
            await until(lambda: not any(suspects.values()))


@pytest.mark.slow
async def test_neighbors_of_a_crashing_request_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes suspects one after another, so that exactly the guilty request is refused."""
    from transformers import LlamaConfig

    from tests.engine.models.tiny_models import SIZES, save

    save(tmp_path / "model", LlamaConfig(**SIZES))
    config = Config(load_timeout=300.0)
    models = [ModelSpec(id="tiny", path=str(tmp_path / "model"), preload=True, idle_seconds=0.0)]
    worker = "tests.engine.processes.faulty_worker"
    async with run_supervisor(monkeypatch, models, config, worker) as server:
        engine = server.engines.engine("tiny")
        await engine.wait_ready()
        # Submitted in one iteration of the event loop, so that they are in the same first step.
        prompts = [[number, number + 1, number + 2] for number in range(10, 16)]
        tasks = [asyncio.create_task(answer(engine, str(prompt), 8, prompt=prompt)) for prompt in prompts[:3]]
        poison = asyncio.create_task(answer(engine, "poison", 8, prompt=[5, CRASH_TOKEN]))
        tasks += [asyncio.create_task(answer(engine, str(prompt), 8, prompt=prompt)) for prompt in prompts[3:]]
        async with asyncio.timeout(600):
            with pytest.raises(RequestSuspected):
                await poison
            answers = await asyncio.gather(*tasks)
            assert all(answers)
            assert server.engines.worker_counts("tiny").crashes == 2
            # The answers are those of requests that were never near a crash.
            assert answers == [await answer(engine, "again", 8, prompt=prompt) for prompt in prompts]

            # One that crashes after it has begun is refused when it has done so alone; its neighbors' streams go on.
            others = [asyncio.create_task(answer(engine, str(n), 200, prompt=[n, n])) for n in (20, 21)]
            with pytest.raises(RequestSuspected):
                await answer(engine, "late", 50, prompt=[6, LATE_CRASH_TOKEN])
            assert await asyncio.gather(*others) == [
                await answer(engine, "again", 200, prompt=[n, n]) for n in (20, 21)
            ]
        assert server.engines.worker_counts("tiny").crashes == 4
