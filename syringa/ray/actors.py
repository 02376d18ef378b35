"""The actors that Ray runs on nodes: one per replica, and one per node that observes it.

An actor dies with its node, and the worker of a replica with its actor. Neither carries a token: API servers connect to
workers directly.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from syringa import logs
from syringa.cluster.folder import ClusterFolder
from syringa.engine.processes.model_fetcher import ModelFetcher
from syringa.engine.processes.nvml import gpu_processes
from syringa.engine.processes.replica_host import ReplicaHost
from syringa.fleet.bridge_protocol import LaunchReplica
from syringa.fleet.provider import OwnerLoad
from syringa.ray.observation import NodeObservation
from syringa.ray.owner_load import OwnerLoadMeter
from syringa.ray.processes import CLUSTER_DIR_VARIABLE, FOLDER_VARIABLE, GPUS_VARIABLE

logger = logging.getLogger("syringa.replica")

TICK_SECONDS = 0.1
LOAD_SECONDS = 2.0  # between two measurements of the owner's load


class NodeAgent:
    """Observes the machine of a node. There is one per node; it ends with the bridge that has started it."""

    def __init__(self, gpus: int) -> None:
        """`gpus`: how many the node offers."""
        visible = os.environ.get(GPUS_VARIABLE)
        self._meter = OwnerLoadMeter(gpus=lambda: gpu_processes(visible), has_gpus=gpus > 0)
        self._load: OwnerLoad | None = None
        threading.Thread(target=self._measure, daemon=True, name="owner-load").start()

    def observe(self) -> bytes:
        return msgspec.msgpack.encode(NodeObservation(self._load))

    def _measure(self) -> None:
        while True:
            try:
                self._load = self._meter.measure()
            except Exception:
                logger.exception("the load of the machine's owner cannot be measured")
                self._load = None
            time.sleep(LOAD_SECONDS)


class ReplicaActor:
    """Runs the worker of a replica on the node of this process."""

    def __init__(self, launch: bytes, address: str) -> None:
        """`launch`: a `LaunchReplica`, msgpack. `address`: that of the node, for API servers."""
        order = msgspec.msgpack.decode(launch, type=LaunchReplica)
        logs.configure("info")
        # Ray ignores this signal, which would hide the exit status of the worker, and is passed on to it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it; the worker has an option for its threads
        folder = tempfile.mkdtemp(prefix="replica-", dir=os.environ.get(FOLDER_VARIABLE))
        cluster = ClusterFolder(Path(os.environ[CLUSTER_DIR_VARIABLE]))
        files = ModelFetcher(
            cluster.path, order.cache_bytes
        )  # they stay in the node's cache as long as this process lives
        self._lock = threading.Lock()
        self._host = ReplicaHost(order, host=address, tls=cluster.files("server"), folder=folder, fetch=files.fetch)
        threading.Thread(target=self._tick, daemon=True, name="replica-host").start()

    def status(self) -> bytes:
        with self._lock:
            return msgspec.msgpack.encode(self._host.status())

    def drain(self, grace: float) -> None:
        with self._lock:
            self._host.drain(grace)

    def stop(self) -> None:
        """End the worker at once."""
        with self._lock:
            self._host.stop(0.0)

    def _tick(self) -> None:
        while not self._host.ended:
            try:
                with self._lock:
                    self._host.tick()
            except Exception:
                logger.exception("host of a replica has failed")
                os._exit(1)  # its worker ends with it, and Ray reports it; otherwise its last status would stand
            time.sleep(TICK_SECONDS)
