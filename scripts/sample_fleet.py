"""A cluster for the pictures of the Fleet page: a real API server and schedules, but nodes that are made up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import ReplicaState, SingleEngineProvider
from syringa.fleet.pools import PoolSpec
from syringa.fleet.schedule import DAYS, PoolSchedule, PoolWindow, is_open, next_change
from syringa.fleet.status import FleetMove, FleetStatus, NodeStatus, PoolStatus
from syringa.http.server.listener import listen
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import stored_key

ZONE = "Europe/Berlin"
GB = 10**9
WEEKDAYS, WEEKEND = DAYS[:5], DAYS[5:]
NIGHT = PoolSchedule(
    mode="scheduled",
    timezone=ZONE,
    windows=(PoolWindow(days=WEEKDAYS, start="20:00", end="06:00"), PoolWindow(days=WEEKEND)),
)
DESKS = PoolSchedule(mode="idle", timezone=ZONE, windows=(PoolWindow(start="18:00", end="08:00"),))
POOLS = (
    PoolSpec(name="datacenter", schedule=PoolSchedule(timezone=ZONE)),
    PoolSpec(name="night", schedule=NIGHT),
    PoolSpec(name="desks", schedule=DESKS),
)
CHAT, SUPPORT = "qwen3-8b", "support-bot"
FINGERPRINT = "5c0e9ab0f1dd3ab6"


class SampleFleet(SingleEngineProvider):
    """Nodes of three pools, of which one is always open, one at night, and one while desks are not used."""

    def __init__(self) -> None:
        super().__init__(FakeEngine("Lilacs bloom in May."))
        self._now = time.time()
        self._night, self._desks = is_open(NIGHT, self._now), is_open(DESKS, self._now)

    def fleet(self) -> FleetStatus:
        night, desks = self._night, self._desks
        closed = "" if night else "outside of its windows"
        owned = "" if desks else "outside of its windows"
        nodes = [
            NodeStatus(
                "gpu-1", "ready", "datacenter", gpus=4, cpus=64, memory=512 * GB, replicas=2, labels={"zone": "a"}
            ),
            NodeStatus(
                "gpu-2", "ready", "datacenter", gpus=4, cpus=64, memory=512 * GB, replicas=2, labels={"zone": "b"}
            ),
            NodeStatus("lab-1", "ready", "night", night, closed, 2, 32, 128 * GB, int(night), {"pool": "night"}),
            NodeStatus("lab-2", "lost", "night", False, "it does not respond", labels={"pool": "night"}),
            NodeStatus("desk-1", "ready", "desks", desks, owned, 0, 16, 32 * GB, int(desks), {"pool": "desks"}),
            NodeStatus("desk-2", "ready", "desks", False, "its owner uses it", 0, 16, 32 * GB, 0, {"pool": "desks"}),
        ]
        pools = [
            PoolStatus("datacenter", "active", nodes=2, offered=2, gpus=8, gpus_used=6, replicas=4),
            PoolStatus(
                "night",
                "degraded" if night else "inactive",
                "scheduled",
                reason="lost: lab-2" if night else "",
                nodes=1,
                offered=int(night),
                gpus=2,
                gpus_used=int(night),
                replicas=int(night),
                changes_at=next_change(NIGHT, self._now),
            ),
            PoolStatus(
                "desks",
                "active" if desks else "inactive",
                "idle",
                nodes=2,
                offered=int(desks),
                cpus=32,
                cpus_used=8 * int(desks),
                replicas=int(desks),
                changes_at=next_change(DESKS, self._now),
            ),
        ]
        return FleetStatus(nodes, pools, moves=self._moves())

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        if model == CHAT:
            ready = [
                ReplicaState(f"{CHAT}-{number}", "ready", node=node, fingerprint=FINGERPRINT)
                for number, node in enumerate(["gpu-1", "gpu-1", "gpu-2"], 1)
            ]
            draining = ReplicaState(f"{CHAT}-4", "draining", node="gpu-2", fingerprint=FINGERPRINT, reason="drained")
            return [*ready, draining]
        found = [("lab-1", self._night), ("desk-1", self._desks)]
        return [
            ReplicaState(f"{SUPPORT}-{node}", "ready", node=node, fingerprint="e81b44a7")
            for node, here in found
            if here
        ]

    def _moves(self) -> list[FleetMove]:
        moves = [
            (6, "stop", f"{CHAT}-4", CHAT, "gpu-2", "an operator drains it"),
            (41, "start", f"{CHAT}-3", CHAT, "gpu-2", "7 requests wait"),
            (43, "start", f"{CHAT}-2", CHAT, "gpu-1", "12 requests wait"),
            (125, "stop", f"{SUPPORT}-lab-2", SUPPORT, "lab-2", "node lab-2 is lost"),
            (190, "stop", f"{SUPPORT}-desk-2", SUPPORT, "desk-2", "its owner is back"),
            (415, "start", f"{CHAT}-1", CHAT, "gpu-1", "one replica is always kept"),
        ]
        return [FleetMove(self._now - 60 * ago, *rest) for ago, *rest in moves]  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def sample_fleet(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Run a server with this cluster, and return its URL and a key with admin rights."""
    config = Config(port=0, cluster=True, database=str(folder / "fleet.db"), pools=POOLS)
    key = await stored_key(config.database, "acme", admin=True, name="ops")
    models = FixedModels([plain_model(id=CHAT), plain_model(id=SUPPORT)])
    listener = listen(config)
    task = asyncio.create_task(serve_api(config, SampleFleet(), models, listener, AppState(config)))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", key
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
