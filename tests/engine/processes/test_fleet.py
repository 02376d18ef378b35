"""A server on a cluster, from the engines of an API server to workers on nodes, over TCP with mutual TLS; no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config, ModelSpec, Replicas
from syringa.engine.client.model_engine import ModelEngine
from syringa.engine.processes.fleet_manager import FleetManager
from syringa.errors import EngineUnavailable, RequestSuspected
from syringa.fleet.cluster_records import ClusterRecords
from tests.engine.processes.hosted_cluster import HOST, HostedCluster
from tests.engine.processes.stub_worker import CRASH
from tests.engine.processes.supervisor_harness import SupervisorHarness, answer, run_supervisor, specs, until
from tests.tiers import slow

LONG = 200  # tokens, which take the stub a second
GUARD_SECONDS = 240.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> ClusterFolder:
    folder = ClusterFolder(tmp_path_factory.mktemp("certificates") / "cluster")
    folder.create("test", [HOST])
    return folder


def settings(certificates: ClusterFolder, **values: Any) -> Config:
    return Config(cluster=True, cluster_dir=str(certificates.path), model="/nowhere", **values)


def replicated(config: Config, name: str = "fine", low: int = 1, high: int = 1, **changes: Any) -> ModelSpec:
    (spec,) = specs(name, config=config)
    return msgspec.structs.replace(spec, replicas=Replicas(min=low, max=high), threads=1, **changes)


@contextlib.asynccontextmanager
async def fleet(
    monkeypatch: pytest.MonkeyPatch,
    cluster: HostedCluster,
    config: Config,
    *models: ModelSpec,
    records: ClusterRecords | None = None,
) -> AsyncIterator[SupervisorHarness]:
    async with run_supervisor(monkeypatch, models, config, records=records) as harness:
        connect(cluster, harness)
        yield harness


def connect(cluster: HostedCluster, harness: SupervisorHarness) -> None:
    manager = harness.supervisor.workers
    assert isinstance(manager, FleetManager)
    cluster.connect(manager.provider.path)


def ready(harness: SupervisorHarness, model: str) -> list[str]:
    return [each.id for each in harness.engines.replicas(model) if each.status == "ready"]


async def until_ready(harness: SupervisorHarness, model: str, count: int) -> list[str]:
    await until(lambda: len(ready(harness, model)) == count)
    return ready(harness, model)


async def begin(harness: SupervisorHarness, name: str) -> tuple[asyncio.Task[list[int]], str]:
    """Begin a long request, which is to be held. Return it and the replica that runs it."""
    begun, engine = asyncio.Event(), harness.engines.engine("fine")
    assert isinstance(engine, ModelEngine)
    stream = asyncio.create_task(answer(engine, name, LONG, begun))
    await begun.wait()
    replica = engine._runs[name].replica
    assert replica is not None
    return stream, replica.state.id


@pytest.mark.parametrize("disturb", ["crash", *slow("drain", "lose")])
async def test_stream_goes_on_at_another_node(
    monkeypatch: pytest.MonkeyPatch, certificates: ClusterFolder, disturb: str
) -> None:
    config = settings(certificates)
    model = replicated(config, low=2, high=2, preload=False)
    with HostedCluster(certificates, "n1", "n2", "n3") as cluster:
        async with fleet(monkeypatch, cluster, config, model) as harness:
            await until(lambda: harness.ready == [None])
            assert await answer(harness.engines.engine("fine")) == [1, 2, 3]  # the first request starts the model
            before = await until_ready(harness, "fine", 2)
            assert len({cluster.node_of(id) for id in before}) == 2
            with cluster.hold():
                stream, replica = await begin(harness, "long")
                node = cluster.node_of(replica)
                if disturb == "crash":
                    os.kill(cluster.pids()[replica], signal.SIGKILL)
                elif disturb == "drain":
                    harness.engines.drain_node(node, 0.0)
                else:
                    cluster.remove_node(node)
                await until(lambda: replica not in ready(harness, "fine"))
            async with asyncio.timeout(GUARD_SECONDS):
                assert await stream == list(range(1, LONG + 1))
            after = await until_ready(harness, "fine", 2)
            assert replica not in after
            if disturb == "drain":
                await until(lambda: cluster.released)
                assert {each.node for each in cluster.released} == {node}  # asked for again after some seconds
            if disturb != "crash":
                assert node not in {cluster.node_of(id) for id in after}
        await until(lambda: cluster.pids() == {})  # the server ends them


@pytest.mark.slow
async def test_request_that_crashes_two_replicas_is_refused_and_the_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, certificates: ClusterFolder
) -> None:
    config = settings(certificates)
    model = replicated(config, low=2, high=2)
    with HostedCluster(certificates, "n1", "n2", "n3") as cluster:
        async with fleet(monkeypatch, cluster, config, model) as harness:
            await until_ready(harness, "fine", 2)
            engine = harness.engines.engine("fine")
            with pytest.raises(RequestSuspected):
                await answer(engine, "poison", prompt=[1, CRASH])
            assert await answer(engine, "good") == [1, 2, 3]
            await until(lambda: harness.engines.worker_counts("fine").crashes == 2)
            with pytest.raises(RequestSuspected):
                await answer(engine, "again", prompt=[1, CRASH])
            assert harness.engines.worker_counts("fine").crashes == 2  # it reached no worker


@pytest.mark.slow
async def test_streams_go_on_while_the_bridge_is_gone_and_replicas_are_taken_over(
    monkeypatch: pytest.MonkeyPatch, certificates: ClusterFolder
) -> None:
    config = settings(certificates, cluster_keep_replicas=True)
    model = replicated(config)
    with HostedCluster(certificates, "n1", "n2") as cluster:
        async with fleet(monkeypatch, cluster, config, model) as harness:
            before = await until_ready(harness, "fine", 1)
            engine = harness.engines.engine("fine")
            manager = harness.supervisor.workers
            assert isinstance(manager, FleetManager)
            with cluster.hold():
                stream, _ = await begin(harness, "long")
                cluster.disconnect()
                await until(lambda: not manager.provider.connected)
            assert await stream == list(range(1, LONG + 1))
            assert await answer(engine, "meanwhile") == [1, 2, 3]
            connect(cluster, harness)
            await until(lambda: manager.provider.connected)
            assert ready(harness, "fine") == before
        pids = cluster.pids()
        assert list(pids) == before  # they were to be kept
        async with fleet(monkeypatch, cluster, config, model) as harness:
            assert await until_ready(harness, "fine", 1) == before
            assert await answer(harness.engines.engine("fine"), "later") == [1, 2, 3]
        assert cluster.pids() == pids


@pytest.mark.slow
async def test_model_without_a_node_gets_unavailable_and_starts_when_one_joins(
    monkeypatch: pytest.MonkeyPatch, certificates: ClusterFolder
) -> None:
    config = settings(certificates, queue_timeout=1.0)
    model = replicated(config, preload=False)
    with HostedCluster(certificates) as cluster:
        async with fleet(monkeypatch, cluster, config, model) as harness:
            engine = harness.engines.engine("fine")
            with pytest.raises(EngineUnavailable) as caught:
                await answer(engine)
            assert caught.value.retry_after
            assert "none was started within 1 seconds" in caught.value.message
            assert caught.value.status == 503
            cluster.nodes |= HostedCluster(certificates, "n1").nodes
            tokens: list[int] = []
            async with asyncio.timeout(GUARD_SECONDS):
                while not tokens:
                    with contextlib.suppress(EngineUnavailable):  # it has waited too long before the node was ready
                        tokens = await answer(engine, "again")
            assert tokens == [1, 2, 3]


@pytest.mark.slow
async def test_real_model_goes_on_at_another_node(
    monkeypatch: pytest.MonkeyPatch, certificates: ClusterFolder, tmp_path: Path
) -> None:
    from tests.engine.worker.tiny_llama import save_tiny_llama  # it imports torch

    (tmp_path / "tiny").mkdir()
    save_tiny_llama(tmp_path / "tiny")
    config = settings(certificates)
    model = replicated(config, str(tmp_path / "tiny"), low=2, high=2)
    worker = "syringa.engine.worker.server"
    with HostedCluster(certificates, "n1", "n2") as cluster:
        async with run_supervisor(monkeypatch, [model], config, worker) as harness:
            connect(cluster, harness)
            await until_ready(harness, model.id, 2)
            engine = harness.engines.engine(model.id)
            prompt = list(range(20))
            expected = await answer(engine, "undisturbed", 200, prompt=prompt)
            begun = asyncio.Event()
            stream = asyncio.create_task(answer(engine, "disturbed", 200, begun, prompt))
            await begun.wait()
            assert isinstance(engine, ModelEngine)
            if (run := engine._runs.get("disturbed")) is not None and run.replica is not None:
                os.kill(cluster.pids()[run.replica.state.id], signal.SIGKILL)
            assert await stream == expected
