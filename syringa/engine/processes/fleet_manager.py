"""The models of a server whose replicas run on the nodes of a cluster.

Where and how many replicas run is decided by the controller (`syringa.fleet`), started and watched by the bridge and
the hosts on the nodes. This manager says which models are wanted, tells the API servers where their replicas are, and
remembers which requests crashed them. Runs in the supervisor's only thread, and never blocks but in `stop`.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from syringa.cluster import served_models
from syringa.config import Config, model_specs
from syringa.engine.processes.bridge_provider import BridgeProvider, EndedReplica
from syringa.engine.processes.cluster_replica import ClusterReplica
from syringa.engine.processes.control import AcquireModel, SupervisorReport, acquire_request, worker_key
from syringa.engine.processes.fleet_model import FleetModel
from syringa.engine.worker.options import WorkerOptions
from syringa.fleet.bridge_protocol import LaunchReplica, ReplicaReport
from syringa.fleet.controller import Controller
from syringa.fleet.decisions import MAX_BACKOFF_SECONDS, SCALE_DOWN_GRACE, ModelTarget
from syringa.fleet.overrides import PoolOverrides
from syringa.fleet.pools import PoolSpec, selects
from syringa.fleet.provider import Node
from syringa.fleet.status import FleetStatus
from syringa.version import installed_version

logger = logging.getLogger("syringa.supervisor")

UNKNOWN_SECONDS = 30.0  # after which a replica of a model that no API server has asked for is ended
MAX_FAILED_STARTS = 2  # in a row, before the failure is reported
UPDATE_SECONDS = 0.5  # between two looks at a provider that has nothing new
KILL_SECONDS = 5.0  # for replicas to end that are killed when the server stops; the bridge itself takes up to 3
POLL_SECONDS = 0.05

RESTART_SECONDS = 60.0  # for which this is the reason that a model has no replica
RESTARTING = "the model worker has ended and is being started again"
BACKING_OFF = f"replicas of the model have failed; the next one is started after up to {MAX_BACKOFF_SECONDS:g} s"


class FleetManager:
    """A `ReplicaManager` of a cluster."""

    def __init__(
        self,
        folder: str,
        config: Config,
        selector: selectors.BaseSelector,
        publish: Callable[[SupervisorReport], None],
        *,
        holds_lease: Callable[[], bool] = lambda: True,
        lease_reason: Callable[[], str] = lambda: "",
        leave: Callable[[], bool] = lambda: True,
        overrides: PoolOverrides | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`publish` is called with every change.

        `holds_lease` says whether this server decides on replicas, and `lease_reason`, why it does not. `leave` is
        called when the server is stopped, and returns whether no other one uses the cluster. `overrides`: see
        `Controller`.
        """
        self._config, self._publish = config, publish
        self._holds_lease, self._lease_reason, self._leave = holds_lease, lease_reason, leave
        self._clock, self._wall = clock, wall
        self.models_file = str(Path(folder) / "served_models.json")  # read by the cluster's server
        self._served: set[str] | None = None  # what the file names
        self._files_error: str | None = None  # why it could not be written
        self._revision, self._next_at = -1, 0.0  # of the provider when it was last looked at, and when to look again
        self._version = installed_version()
        self._models: dict[str, FleetModel] = {}
        self.provider = BridgeProvider(folder, selector, self._launch, self._adopts, clock=clock)
        self.controller = Controller(
            self.provider,
            self._targets,
            clock,
            self._may_decide,
            pools=config.pools,
            overrides=overrides,
            wall=wall,
        )
        for spec in model_specs(config):  # so that their replicas are taken over
            request = acquire_request(spec, config)
            self._model(request.options).configure(msgspec.structs.replace(request, restart=False))

    # What API servers and operators ask for

    def acquire(self, request: AcquireModel, planned_free: int = 0) -> FleetModel:
        now = self._clock()
        model = self._model(request.options)
        model.configure(request)
        if not request.opportunistic:
            model.requested_at = now
        if model.restart or not request.opportunistic:
            if model.failure and now >= model.retry_at:
                model.failure = ""
            model.wanted = True
        self._publish_change(model)
        return model

    def release(self, key: str) -> None:
        if model := self._models.get(key):
            model.released, model.restart, model.wanted, model.warm = True, False, False, False

    def keep(self, key: str, idle_timeout: float) -> None:
        """Set the idle timeout of a loaded model, until it is loaded again."""
        if model := self._models.get(key):
            model.idle_timeout = idle_timeout
            self._publish_change(model)

    def drain(self, id: str, grace: float) -> bool:
        replica = self.provider.running.get(id)
        if replica is None or not replica.usable:
            return False
        logger.info("replica is drained: replica=%s grace=%g", id, grace)
        self.provider.stop(id, grace)
        self._publish_changes()
        return True

    def drain_node(self, name: str, grace: float | None) -> None:
        pool = self._pool(self.provider.node(name))
        self.provider.drain_node(name, grace, pool.preemption.grace_period if pool is not None else SCALE_DOWN_GRACE)

    def set_pool(self, name: str, open: bool | None) -> None:
        self.controller.set_pool(name, open)

    def fleet_status(self) -> FleetStatus:
        return self.controller.status()

    def clear_suspect(self, key: str, fingerprint: bytes) -> None:
        model = self._models.get(key)
        if model is not None and model.suspects.clear(fingerprint):
            self._publish(model.suspects_message())

    def reports(self) -> list[SupervisorReport]:
        suspects = [model.suspects_message() for model in self._models.values()]
        return [*(each for each in suspects if each.levels), *(model.state() for model in self._models.values())]

    def processes(self) -> dict[str, int]:
        return {}

    def tick(self) -> None:
        """Read reports, account for what has ended, unload idle models, and publish what has changed."""
        self.provider.tick()
        now = self._clock()
        if self.provider.revision == self._revision and now < self._next_at:
            return
        self._next_at = now + UPDATE_SECONDS
        for key in self.provider.take_hung():
            if model := self._models.get(key):
                model.hangs += 1
        for ended in self.provider.take_ended():
            self._account(ended)
        if self._may_decide():
            self.provider.retire_unknown(now - UNKNOWN_SECONDS, SCALE_DOWN_GRACE)
        for model in list(self._models.values()):
            self._update(model, now)
        self._revision = self.provider.revision
        self._publish_files()
        self._publish_changes()

    def stop(self, grace: float, *, leave_replicas: bool = False) -> None:
        """End the replicas, unless they are to be kept or another server uses them. Wait until they have ended."""
        last = self._leave()
        if leave_replicas:
            logger.error("replicas are left running, for the next server: count=%d", len(self.provider.running))
        elif not last:
            logger.info("replicas are left running: another server may use them")
        elif not self._config.cluster_keep_replicas:
            for id in list(self.provider.running):
                self.provider.stop(id, 0.0)
            self.provider.retire_unknown(self._clock(), 0.0)
            self._wait_until_ended(grace)
            self.provider.kill_all()
            self._wait_until_ended(KILL_SECONDS)
            if left := len(self.provider.running) + len(self.provider.unknown):
                logger.warning("replicas are left running: count=%d reason=%r", left, self.provider.reason)
        self.provider.close()

    def _wait_until_ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        provider = self.provider
        while (provider.running or provider.unknown) and provider.connected and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            provider.tick()

    # Models

    def _model(self, options: WorkerOptions) -> FleetModel:
        key = worker_key(options)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = FleetModel(key, options, self.provider, self._clock)
        return model

    def _update(self, model: FleetModel, now: float) -> None:
        replicas = model.replicas
        ready = [each for each in replicas if each.phase == "ready"]
        for replica in ready:
            model.info = replica.report.info or model.info
        if ready:
            model.warm = model.wanted
            model.used_at = max(model.used_at, now - min(each.idle_seconds(now) for each in ready))
            model.failed_starts, model.failure = 0, ""
            model.reset_back_off()
        elif model.failure and model.restart and now >= model.retry_at:
            model.failure = ""
        model.wait_reason = self._wait_reason(model)
        if model.suspects.expire():
            self._publish(model.suspects_message())
        if self._may_decide():
            self._unload(model, replicas, now)
        elif not replicas and not model.restart and 0 < self._patience <= now - model.requested_at:
            model.wanted = False  # the server that decides has unloaded it, or has never had it
        if model.released and not replicas:
            self._publish(model.state())
            del self._models[model.key]

    def _unload(self, model: FleetModel, replicas: Sequence[ClusterReplica], now: float) -> None:
        """End the replicas of a model that is idle or no longer configured, and give up one that cannot be had."""
        usable = [each for each in replicas if each.usable]
        waited = now - model.requested_at
        if model.released:
            leaves = not any(each.running or each.waiting for each in usable)
        elif usable and all(each.phase == "ready" for each in usable):
            idle = min(each.idle_seconds(now) for each in usable)
            leaves = 0 < model.idle_timeout <= min(idle, waited)
        elif not model.restart and all(each.phase == "queued" for each in usable):
            if model.warm:  # its replicas were lost or drained: it is kept as long as they would have been
                leaves = 0 < model.idle_timeout <= min(now - model.used_at, waited)
            else:
                leaves = 0 < self._patience <= waited  # the requests have timed out
        else:
            leaves = False
        if leaves:
            model.wanted = model.warm = False
            for each in usable:
                logger.info("model is unloaded: model=%s replica=%s", model.name, each.id)
                self.provider.stop(each.id, SCALE_DOWN_GRACE)

    @property
    def _patience(self) -> float:
        """The seconds that a request waits for its model."""
        return self._config.queue_timeout or self._config.load_timeout

    def _wait_reason(self, model: FleetModel) -> str:
        if not self.provider.connected:
            return f"the cluster cannot be reached: {self.provider.reason}"
        if not self._holds_lease():
            return self._lease_reason()
        if shortage := self.controller.shortages.get(model.key):
            return shortage
        if self._clock() - model.failed_at < RESTART_SECONDS:
            return RESTARTING
        return BACKING_OFF if self.controller.backs_off(model.key) else ""

    def _account(self, ended: EndedReplica) -> None:
        """Remember the requests that a crashed replica computed, and why one could not be started."""
        report = ended.report
        model = self._models.get(report.model)
        if model is None:
            return
        if report.failed or report.crashed:
            model.failed_at = self._clock()
            where = f"model={model.name} replica={report.id} node={report.node}"
            logger.error("replica has ended: %s reason=%r", where, report.reason)
        if report.crashed:
            model.crashes += 1
            if report.suspects:
                model.suspects.record_crash(report.suspects)
                self._publish(model.suspects_message())
        if report.failed and ended.known and not ended.was_ready and not ended.lost:
            model.failed_starts += 1
            # What cannot work on this node may work on another one.
            others = sum(node.condition == "ready" for node in self.provider.nodes()) > 1
            if model.failed_starts >= MAX_FAILED_STARTS or not (report.retryable or others):
                model.failure = report.reason
                model.back_off(self._clock())

    def _publish_files(self) -> None:
        """Name the models whose files nodes may fetch."""
        served = {model.options.model for model in self._models.values()}
        if served == self._served:
            return
        try:
            served_models.publish(Path(self.models_file), served)
        except OSError as error:  # tried again at the next update
            if error.strerror != self._files_error:
                logger.error("nodes cannot fetch new models: file=%s error=%s", self.models_file, error.strerror)
            self._files_error = error.strerror
            return
        self._served, self._files_error = served, None

    def _publish_changes(self) -> None:
        for model in self._models.values():
            self._publish_change(model)

    def _publish_change(self, model: FleetModel) -> None:
        state = model.state()
        if state != model.published:
            model.published = state
            self._publish(state)

    # What the controller and the provider ask for

    def _targets(self) -> list[ModelTarget]:
        return [model.target() for model in self._models.values()]

    def _may_decide(self) -> bool:
        return self.provider.connected and self._holds_lease()

    def _launch(self, key: str, node_name: str) -> LaunchReplica:
        """Describe a new replica. Its options name no file of this machine but the model's, which the node fetches."""
        model, node = self._models[key], self.provider.node(node_name)
        needs = model.target().needs
        gpus, pool = needs.gpus_on(node) if node is not None else 0, self._pool(node)
        options = msgspec.structs.replace(model.options, socket="", listen="", tls=None)
        return LaunchReplica(
            self._new_id(model.short_name),
            key,
            node_name,
            msgspec.json.encode(options),
            gpus=gpus,
            cpus=0 if gpus else needs.cpus,  # as the controller counts them
            pool=pool.name if pool is not None else "",
            cache_bytes=int(pool.cache.capacity * 2**30) if pool is not None else 0,
            started_at=self._wall(),
            name=model.name,
            heartbeat_timeout=self._config.heartbeat_timeout,
            step_timeout=self._config.step_timeout,
            version=self._version,
        )

    def _pool(self, node: Node | None) -> PoolSpec | None:
        if node is None:
            return None
        return next((each for each in self._config.pools if selects(each, node.labels)), None)

    def _new_id(self, name: str) -> str:
        while True:
            id = f"{name}-{secrets.token_hex(5)}"
            if id not in self.provider.running and id not in self.provider.unknown:
                return id

    def _adopts(self, report: ReplicaReport) -> bool:
        model = self._models.get(report.model)
        if model is None or report.version != self._version:
            return False
        model.wanted = model.wanted or not model.released
        return True
