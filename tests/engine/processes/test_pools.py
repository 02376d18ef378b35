"""Pools of a server on a cluster: what an operator opens and closes, from an API server to the replicas."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest

from syringa.cli.database_records import DatabaseRecords
from syringa.cluster.folder import ClusterFolder
from syringa.config import Config
from syringa.fleet.pools import PoolSpec
from tests.engine.processes.hosted_cluster import HOST, HostedCluster
from tests.engine.processes.supervisor_harness import SupervisorHarness, answer, until
from tests.engine.processes.test_fleet import GUARD_SECONDS, LONG, begin, fleet, replicated, until_ready


def pool_state(harness: SupervisorHarness, name: str) -> str:
    return next((pool.state for pool in harness.engines.fleet().pools if pool.name == name), "")


@pytest.mark.slow
async def test_stream_moves_when_an_operator_closes_its_pool_which_stays_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificates = ClusterFolder(tmp_path / "cluster")
    certificates.create("test", [HOST])
    pools = (PoolSpec(name="always"), PoolSpec(name="night"))
    config = Config(cluster=True, cluster_dir=str(certificates.path), model="/nowhere", pools=pools)
    model = msgspec.structs.replace(replicated(config), pools=("night", "always"))

    def records() -> DatabaseRecords:
        return DatabaseRecords(f"sqlite:///{tmp_path / 'test.db'}", "fleet")

    with HostedCluster(certificates, "a1", "n1") as cluster:
        for name, pool in (("a1", "always"), ("n1", "night")):
            cluster.nodes[name] = dataclasses.replace(cluster.nodes[name], labels={"pool": pool})
        async with fleet(monkeypatch, cluster, config, model, records=records()) as harness:
            await until_ready(harness, "fine", 1)
            with cluster.hold():
                stream, replica = await begin(harness, "long")
                assert cluster.node_of(replica) == "n1"
                await until(lambda: pool_state(harness, "night") == "active")
                away = cluster.nodes.pop("a1")  # the pool is closing for as long as there is no other node
                await until(lambda: [each.name for each in harness.engines.fleet().nodes] == ["n1"])
                harness.engines.set_pool("night", False)
                await until(lambda: pool_state(harness, "night") == "closing")
                cluster.nodes["a1"] = away
                await until(lambda: replica not in [each.id for each in harness.engines.replicas("fine")])
            async with asyncio.timeout(GUARD_SECONDS):
                assert await stream == list(range(1, LONG + 1))
            await until(lambda: pool_state(harness, "night") == "inactive")
            (after,) = await until_ready(harness, "fine", 1)
            assert cluster.node_of(after) == "a1"
            assert harness.engines.fleet().evictions["pool_closed"] == 1
            node = next(each for each in harness.engines.fleet().nodes if each.name == "n1")
            assert (node.pool, node.offered, node.reason) == ("night", False, "pool night is closed")
        async with fleet(monkeypatch, cluster, config, model, records=records()) as harness:  # it is started again
            (again,) = await until_ready(harness, "fine", 1)
            assert cluster.node_of(again) == "a1"
            assert await answer(harness.engines.engine("fine")) == [1, 2, 3]
            await until(lambda: pool_state(harness, "night") == "inactive")  # once it has read the records
            (still,) = await until_ready(harness, "fine", 1)
            assert cluster.node_of(still) == "a1"
