"""The supervisor of `syringa serve`: starts API servers and model workers, restarts what dies, and shuts down all."""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa import logs
from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import (
    Acceptor,
    AcquireModel,
    AcquireProbe,
    ClearSuspect,
    DrainNode,
    DrainReplica,
    KeepModel,
    MessageConnection,
    ReleaseModel,
    SetPool,
    SupervisorReport,
    SupervisorRequest,
    acquire_request,
    supervisor_decoder,
)
from syringa.engine.processes.coordinator import ClusterCoordinator
from syringa.engine.processes.local_provider import LocalProvider
from syringa.engine.processes.managed_process import ManagedProcess
from syringa.engine.processes.manager import WorkerManager
from syringa.engine.processes.model_state import ReplicaManager
from syringa.engine.processes.probes import GrammarProbes
from syringa.engine.processes.runtime_dir import runtime_dir
from syringa.fleet.cluster_records import ClusterRecords
from syringa.fleet.controller import Controller
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.supervisor")

API_MODULE = "syringa.http.server.process"
POLL_SECONDS = 0.05
DRAIN_MARGIN_SECONDS = 5.0  # for an API server to fail the remaining requests and exit, after its drain timeout
SAME_SIGNAL_SECONDS = 0.6  # an API server takes two signals within this time for one
STOP_SECONDS = 5.0  # for workers to exit, after the API servers have
SERVICE_SECONDS = 3.0  # for the processes of a cluster to exit, after the workers have
FLEET_REPORT_SECONDS = 1.0  # between two reports of nodes and pools, which are large in a large cluster


class SharedPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of what the API servers share. Opaque to the supervisor."""

    limits: str | None = None  # file of the shared rate limiter
    metrics: str | None = None  # folder of multi-process metrics


class ApiServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an API server process. Passed through a pipe, because the config holds keys."""

    config: Config
    control: str  # path of the supervisor's control socket
    listener: int  # file descriptor of the listening HTTP socket
    ollama_listener: int = -1  # of that of `ollama_port`; -1: there is none
    index: int = 0  # number of this API server
    shared: SharedPaths = SharedPaths()


class Supervisor:
    def __init__(
        self,
        config: Config,
        default: ModelSpec,
        listener: socket.socket,
        folder: str,
        shared: SharedPaths = SharedPaths(),
        records: ClusterRecords | None = None,
        ollama: socket.socket | None = None,
    ) -> None:
        """`default`: the model that must load for the server to start, if it is preloaded.

        `records`: of the servers that share a cluster; None: this is the only one. `ollama`: the listening socket of
        `ollama_port`, if there is one.
        """
        self.config, self.default = config, default
        self._coordinator = ClusterCoordinator(records) if records is not None else None
        self.services: list[ManagedProcess] = []  # those of a cluster
        self.stopping = self.force_stop = False
        self._listeners = [each for each in (listener, ollama) if each is not None]
        self._selector = selectors.DefaultSelector()
        self._connections: list[MessageConnection[SupervisorRequest]] = []
        self._control = protocol.listen(str(Path(folder) / "control.sock"))
        self._acceptor = Acceptor(self._control)
        self._selector.register(self._control, selectors.EVENT_READ)
        self.workers, self.controller = self._replicas(folder)
        self._fleet_status, self._fleet_reported_at = self.workers.fleet_status(), time.monotonic()
        self.probes = GrammarProbes(folder)
        self.api_servers = [
            self._api_server(ApiServerOptions(
                config=config,
                control=self._control.getsockname(),
                listener=listener.fileno(),
                ollama_listener=-1 if ollama is None else ollama.fileno(),
                index=index,
                shared=shared,
            ))
            for index in range(config.workers)
        ]  # fmt: skip

    def _replicas(self, folder: str) -> tuple[ReplicaManager, Controller]:
        """Return what runs the replicas, on this machine or on a cluster, and what decides how many there are."""
        if not self.config.cluster:
            if self.config.pools:
                logger.warning("pools are used in a cluster only, which `syringa cluster start` starts")
            workers = WorkerManager(folder, self.config, self._selector, self._broadcast)
            provider = LocalProvider(workers)
            return workers, Controller(provider, provider.targets, time.monotonic)
        from syringa.engine.processes.fleet_manager import FleetManager
        from syringa.engine.processes.fleet_services import cluster_services

        if (coordinator := self._coordinator) is None:
            fleet = FleetManager(folder, self.config, self._selector, self._broadcast)
        else:
            fleet = FleetManager(
                folder,
                self.config,
                self._selector,
                self._broadcast,
                holds_lease=lambda: coordinator.decides,
                lease_reason=lambda: coordinator.reason,
                leave=coordinator.leave,
                overrides=coordinator.overrides,
            )
        self.services = cluster_services(self.config, fleet.provider.path, fleet.models_file)
        return fleet, fleet.controller

    @staticmethod
    def _api_server(options: ApiServerOptions) -> ManagedProcess:
        name = f"API server {options.index}"
        listeners = tuple(each for each in (options.listener, options.ollama_listener) if each >= 0)
        return ManagedProcess(name, lambda: managed_process.spawn(API_MODULE, options, pass_fds=listeners))

    def run(self, on_ready: Callable[[ModelInfo | None], None], planned_free: int = 0) -> int:
        """Serve until a signal, or until an API server or the default model cannot start. Return an exit status.

        `on_ready` is called once: when the default model is loaded, or at once with None if it is loaded on demand or
        on a cluster.
        `planned_free`: the bytes of memory that the default model was planned for; 0: what is free when it is loaded.
        """
        if self._coordinator is not None:
            self._coordinator.start()
        default = None
        if self.default.preload:
            default = self.workers.acquire(acquire_request(self.default, self.config), planned_free)
        if default is None or self.config.cluster:  # nodes may join later
            on_ready(None)
            default = None
        failed = False
        try:
            while not self.stopping:
                self._selector.select(POLL_SECONDS)
                self._serve_control()
                self.workers.tick()
                self.controller.tick()
                self._report_fleet()
                self.probes.tick()
                if default is not None and default.failed:
                    if not default.failure_reported:
                        print(f"syringa: the model could not be loaded: {default.reason}", file=sys.stderr)
                    return 1
                if default is not None and default.info is not None:
                    on_ready(default.info)
                    default = None
                for each in self.api_servers:
                    status = each.poll()
                    if status == managed_process.EXIT_CANNOT_START:
                        return 1  # it has printed the reason
                    if status is not None:
                        exit_ = managed_process.describe_exit(status)
                        logger.error("%s died: exit=%s, restarting", each.name, exit_)
                if not self._poll_services():
                    return 1
        except Exception:
            failed = True  # replicas of a cluster are left to the next server
            raise
        finally:
            self.stop(leave_replicas=failed)
        return 0

    def stop(self, *, leave_replicas: bool = False) -> None:
        """Drain and stop the API servers, then stop the workers. A second signal ends draining.

        `leave_replicas`: leave those of a cluster running, which outlive this process.
        """
        running = [each.process for each in self.api_servers if each.process is not None]
        if not self.stopping:  # the server could not start: there is nothing to drain
            for process in running:
                process.kill()
        signaled_at = _terminate(running)
        deadline = signaled_at + self.config.drain_timeout + DRAIN_MARGIN_SECONDS
        while any(process.poll() is None for process in running) and (now := time.monotonic()) < deadline:
            if self.force_stop and now - signaled_at > SAME_SIGNAL_SECONDS:
                self.force_stop = False
                deadline = min(deadline, _terminate(running) + DRAIN_MARGIN_SECONDS)
            self._selector.select(POLL_SECONDS)
            if self.stopping:
                self._serve_control()
                self.workers.tick()
            else:
                time.sleep(POLL_SECONDS)  # select returns at once for events that are no longer handled
        for each in self.api_servers:
            each.stop(0.0)
        for listener in self._listeners:
            listener.close()  # refuse connections that were not accepted yet
        self.probes.stop()
        self.workers.stop(STOP_SECONDS, leave_replicas=leave_replicas)
        if self._coordinator is not None:
            self._coordinator.stop()
        for service in self.services:
            service.stop_after(SERVICE_SECONDS)
        for connection in self._connections:
            connection.close()
        self._control.close()
        self._selector.close()

    def _poll_services(self) -> bool:
        """Restart the processes of a cluster that have ended. Return False if one can never start."""
        for each in self.services:
            status = each.poll()
            if status is None:
                continue
            if status == managed_process.EXIT_CANNOT_START and each.starts == 1:
                return False  # it has printed the reason
            logger.error("%s died: exit=%s, restarting", each.name, managed_process.describe_exit(status))
        return True

    def _serve_control(self) -> None:
        while (accepted := self._acceptor.accept()) is not None:
            connection = MessageConnection(accepted, supervisor_decoder(), self._selector)
            self._connections.append(connection)
            for report in (*self.workers.reports(), self._fleet_status):
                connection.send(report)
        for connection in list(self._connections):
            connection.flush()
            for message in connection.receive():
                match message:
                    case AcquireModel():
                        connection.send(self.workers.acquire(message).state())
                    case ReleaseModel(key):
                        self.workers.release(key)
                    case KeepModel(key, idle_timeout):
                        self.workers.keep(key, idle_timeout)
                    case DrainReplica(id, grace):
                        self.workers.drain(id, grace)
                    case DrainNode(node, node_grace):
                        self.workers.drain_node(node, node_grace)
                    case SetPool(pool, open_):
                        self.workers.set_pool(pool, open_)
                    case ClearSuspect(key, fingerprint):
                        self.workers.clear_suspect(key, fingerprint)
                    case AcquireProbe(options):
                        self.probes.acquire(options)
            if not connection.open:
                self._connections.remove(connection)

    def _report_fleet(self) -> None:
        """Tell the API servers about nodes and pools if anything has changed."""
        now = time.monotonic()
        if now < self._fleet_reported_at + FLEET_REPORT_SECONDS:
            return
        self._fleet_reported_at = now
        status = msgspec.structs.replace(self.workers.fleet_status(), recovery=self.controller.recovery)
        if status != self._fleet_status:
            self._fleet_status = status
            self._broadcast(status)

    def _broadcast(self, report: SupervisorReport) -> None:
        for connection in self._connections:
            connection.send(report)


def run(
    config: Config,
    default: ModelSpec,
    listener: socket.socket,
    on_ready: Callable[[ModelInfo | None], None],
    prepare: Callable[[str], SharedPaths] = lambda folder: SharedPaths(),
    planned_free: int = 0,
    records: ClusterRecords | None = None,
    ollama: socket.socket | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Return an exit status.

    `prepare` creates what the API servers share in the runtime directory, and returns its paths. `planned_free`: see
    `Supervisor.run`; `records`, `ollama`: see `Supervisor`.
    """
    logs.configure(config.log_level, config.log_format, prompts=config.log_prompts)
    logger.info("listening host=%s port=%d", *listener.getsockname()[:2])
    if ollama is not None:
        logger.info("listening for clients of Ollama: host=%s port=%d", *ollama.getsockname()[:2])
    with runtime_dir() as folder:
        supervisor = Supervisor(config, default, listener, folder, prepare(folder), records, ollama)

        def stop(*_: object) -> None:
            supervisor.force_stop, supervisor.stopping = supervisor.stopping, True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        return supervisor.run(on_ready, planned_free)


def _terminate(processes: list[subprocess.Popen[bytes]]) -> float:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    return time.monotonic()
