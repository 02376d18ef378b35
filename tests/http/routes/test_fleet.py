"""Administration of nodes and pools over HTTP, and what `/status` and `/metrics` say of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.api.openapi.operations import STATUS as STATUS_OPERATION
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.fleet.pools import PoolSpec
from syringa.fleet.schedule import PoolSchedule, PoolWindow
from syringa.fleet.status import FleetMove, FleetStatus, NodeStatus, PoolStatus
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.types import HistogramCounts
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import bearer, stored_key

STATUS = FleetStatus(
    nodes=[
        NodeStatus("gpu-1", "ready", "night", gpus=2, cpus=32, memory=1 << 30, replicas=1, labels={"pool": "night"}),
        NodeStatus("gpu-2", "lost", "night", offered=False, reason="it does not respond"),
        NodeStatus("cpu-1", "ready", "", offered=False, reason="belongs to no pool"),
    ],
    pools=[
        PoolStatus("night", "degraded", "scheduled", nodes=1, offered=1, gpus=2, gpus_used=1, replicas=1,
                   reason="lost: gpu-2", changes_at=1_769_806_800.5),
        PoolStatus("spare", "inactive", "always", override=False),
    ],
    evictions={"pool_closed": 3, "owner_returned": 0},
    recovery=HistogramCounts((1.0, 5.0), (0, 2, 1), 13.5),
    moves=[FleetMove(1_769_800_000.5, "stop", "m-1", "m", "gpu-2", "node gpu-2 is lost")],
)  # fmt: skip


class ClusterEngines(SingleEngineProvider):
    """Engines of a cluster, and a record of what was asked for."""

    def __init__(self, status: FleetStatus = STATUS) -> None:
        super().__init__(FakeEngine("hello"))
        self.status_of_fleet = status
        self.drained: list[tuple[str, float | None]] = []
        self.pools: list[tuple[str, bool | None]] = []

    def fleet(self) -> FleetStatus:
        return self.status_of_fleet

    def drain_node(self, node: str, grace: float | None) -> None:
        self.drained.append((node, grace))

    def set_pool(self, pool: str, open: bool | None) -> None:
        self.pools.append((pool, open))


@asynccontextmanager
async def server(engines: SingleEngineProvider, database: str) -> AsyncIterator[httpx.AsyncClient]:
    schedule = PoolSchedule(timezone="Europe/Berlin", windows=(PoolWindow(days=("fri",), start="22:00", end="06:00"),))
    config = Config(database=database, pools=(PoolSpec(name="night", schedule=schedule),))
    app_state = AppState(config)
    app = create_app(config, engines, FixedModels([plain_model(id="m")]), app_state)
    await app_state.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        try:
            yield http
        finally:
            await app_state.close()


async def test_nodes_are_listed(database: str) -> None:
    async with server(ClusterEngines(), database) as http:
        first, second, third = (await http.get("/admin/nodes")).json()["data"]
    assert first == {
        "object": "node",
        "name": "gpu-1",
        "state": "ready",
        "pool": "night",
        "offered": True,
        "reason": None,
        "gpus": 2,
        "cpus": 32,
        "memory": 1 << 30,
        "replicas": 1,
        "labels": {"pool": "night"},
    }
    assert (second["state"], second["reason"], second["cpus"]) == ("lost", "it does not respond", None)
    assert third["pool"] is None


async def test_pools_are_listed(database: str) -> None:
    async with server(ClusterEngines(), database) as http:
        night, spare = (await http.get("/admin/pools")).json()["data"]
    assert night == {
        "object": "pool",
        "name": "night",
        "state": "degraded",
        "reason": "lost: gpu-2",
        "mode": "scheduled",
        "override": None,
        "changes_at": 1_769_806_800,
        "nodes": 1,
        "offered": 1,
        "gpus": 2,
        "gpus_used": 1,
        "cpus": 0,
        "cpus_used": 0,
        "replicas": 1,
        "timezone": "Europe/Berlin",
        "windows": [{"days": ["fri"], "start": "22:00", "end": "06:00"}],
    }
    assert (spare["override"], spare["changes_at"]) == ("closed", None)
    assert (spare["timezone"], spare["windows"]) == ("UTC", [])


async def test_moves_are_listed_with_their_reasons(database: str) -> None:
    async with server(ClusterEngines(), database) as http:
        (move,) = (await http.get("/admin/moves")).json()["data"]
    assert move == {
        "object": "move",
        "at": 1_769_800_000,
        "action": "stop",
        "replica": "m-1",
        "model": "m",
        "node": "gpu-2",
        "reason": "node gpu-2 is lost",
    }


async def test_node_is_drained_with_the_grace_of_the_request_or_its_pool(database: str) -> None:
    engines = ClusterEngines()
    async with server(engines, database) as http:
        for body in ({"grace": 2.5}, {}):
            answer = await http.post("/admin/nodes/gpu-1/drain", json=body)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["state"], answer.json()["offered"]) == ("draining", False)
        for grace in (-1, "soon", 1e9):
            answer = await http.post("/admin/nodes/gpu-1/drain", json={"grace": grace})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grace")
        answer = await http.post("/admin/nodes/gpu-9/drain", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")
    assert engines.drained == [("gpu-1", 2.5), ("gpu-1", None)]


async def test_pool_is_opened_closed_and_reset(database: str) -> None:
    engines = ClusterEngines()
    async with server(engines, database) as http:
        for action, override in (("open", "open"), ("close", "closed"), ("reset", None)):
            answer = await http.post(f"/admin/pools/night/{action}")
            assert answer.status_code == 200, answer.text
            assert (answer.json()["name"], answer.json()["override"]) == ("night", override)
            answer = await http.post(f"/admin/pools/unknown/{action}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "pool_not_found")
    assert engines.pools == [("night", True), ("night", False), ("night", None)]


async def test_server_without_a_cluster_has_one_node_and_no_pools(database: str) -> None:
    async with server(SingleEngineProvider(FakeEngine("hello")), database) as http:
        (node,) = (await http.get("/admin/nodes")).json()["data"]
        assert (node["name"], node["state"], node["pool"]) == ("local", "ready", None)
        assert (await http.get("/admin/pools")).json()["data"] == []
        answer = await http.post("/admin/nodes/local/drain", json={})
        assert answer.status_code == 400
        assert "stop the server" in answer.json()["error"]["message"]
        assert (await http.post("/admin/pools/night/open")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/nodes"),
        ("POST", "/admin/nodes/gpu-1/drain"),
        ("GET", "/admin/pools"),
        ("GET", "/admin/moves"),
        ("POST", "/admin/pools/night/open"),
        ("POST", "/admin/pools/night/close"),
        ("POST", "/admin/pools/night/reset"),
    ],
)
async def test_fleet_endpoints_require_an_administrator(database: str, method: str, path: str) -> None:
    key, admin = await stored_key(database), await stored_key(database, admin=True)
    async with server(ClusterEngines(), database) as http:
        body: Any = {} if path.endswith("drain") else None
        assert (await http.request(method, path, json=body)).status_code == 401
        assert (await http.request(method, path, json=body, headers=bearer(key))).status_code == 403
        assert (await http.request(method, path, json=body, headers=bearer(admin))).status_code == 200


async def read_status(http: httpx.AsyncClient) -> Any:
    report = (await http.get("/status")).raise_for_status().json()
    schema: Any = STATUS_OPERATION.response
    jsonschema.validate(report, schema)
    return report


async def test_status_counts_nodes_and_pools_by_state_evictions_and_recoveries_without_names(database: str) -> None:
    async with server(ClusterEngines(), database) as http:
        report = await read_status(http)
    assert report["nodes"] == {"ready": 2, "lost": 1}
    assert report["pools"] == {"degraded": 1, "inactive": 1}
    assert report["evictions"] == {"pool_closed": 3, "owner_returned": 0}
    assert report["recovery"] == {"count": 3, "mean_seconds": 4.5}
    assert not {each for each in ("gpu-1", "gpu-2", "night", "spare") if each in str(report)}
    async with server(SingleEngineProvider(FakeEngine("hello")), database) as http:
        report = await read_status(http)
    assert (report["nodes"], report["pools"], report["evictions"]) == ({"ready": 1}, {}, {})
    assert report["recovery"] == {"count": 0, "mean_seconds": None}
    assert report["moves"] == {}
    assert report["router"] == {"requests": 0, "hit_share": None}


async def test_metrics_have_nodes_pools_evictions_and_recovery_times(database: str) -> None:
    async with server(ClusterEngines(), database) as http:
        text = (await http.get("/metrics")).text
    for line in (
        'syringa_nodes{pool="night",state="ready"} 1.0',
        'syringa_nodes{pool="night",state="lost"} 1.0',
        'syringa_nodes{pool="night",state="draining"} 0.0',
        'syringa_nodes{pool="",state="ready"} 1.0',
        'syringa_pools{pool="night",state="degraded"} 1.0',
        'syringa_pools{pool="night",state="active"} 0.0',
        'syringa_pools{pool="spare",state="inactive"} 1.0',
        'syringa_pool_gpus{pool="night"} 2.0',
        'syringa_pool_gpus_used{pool="night"} 1.0',
        'syringa_pool_nodes_offered{pool="night"} 1.0',
        'syringa_replica_evictions_total{reason="pool_closed"} 3.0',
        'syringa_replica_evictions_total{reason="owner_returned"} 0.0',
        'syringa_recovery_seconds_bucket{le="1.0"} 0.0',
        'syringa_recovery_seconds_bucket{le="5.0"} 2.0',
        'syringa_recovery_seconds_bucket{le="+Inf"} 3.0',
        "syringa_recovery_seconds_sum 13.5",
    ):
        assert line in text.splitlines(), line


async def test_metrics_for_a_key_of_one_organization_say_nothing_of_the_fleet(database: str) -> None:
    key = await stored_key(database)
    await stored_key(database, organization="other")
    async with server(ClusterEngines(), database) as http:
        text = (await http.get("/metrics", headers=bearer(key))).text
    assert "syringa_build_info" in text
    assert "night" not in text
    assert "recovery" not in text
