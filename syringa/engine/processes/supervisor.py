"""The supervisor of `syringa serve`: starts API servers and model workers, restarts what dies, and shuts down all."""

from __future__ import annotations

import contextlib
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
    AcquireModel,
    AcquireProbe,
    ClearSuspect,
    DrainReplica,
    MessageConnection,
    ReleaseModel,
    SupervisorReport,
    SupervisorRequest,
    acquire_request,
    supervisor_decoder,
)
from syringa.engine.processes.local_provider import LocalProvider
from syringa.engine.processes.managed_process import ManagedProcess
from syringa.engine.processes.manager import WorkerManager
from syringa.engine.processes.probes import GrammarProbes
from syringa.engine.processes.runtime_dir import runtime_dir
from syringa.fleet.controller import Controller
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.supervisor")

API_MODULE = "syringa.http.server.process"
POLL_SECONDS = 0.05
DRAIN_MARGIN_SECONDS = 5.0  # for an API server to fail the remaining requests and exit, after its drain timeout
SAME_SIGNAL_SECONDS = 0.6  # an API server takes two signals within this time for one
STOP_SECONDS = 5.0  # for workers to exit, after the API servers have


class SharedPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of what the API servers share. Opaque to the supervisor."""

    limits: str | None = None  # file of the shared rate limiter
    metrics: str | None = None  # folder of multi-process metrics


class ApiServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an API server process. Passed through a pipe, because the config holds keys."""

    config: Config
    control: str  # path of the supervisor's control socket
    listener: int  # file descriptor of the listening HTTP socket
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
    ) -> None:
        """`default`: the model that must load for the server to start, if it is preloaded."""
        self.config, self.default = config, default
        self.stopping = self.force_stop = False
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._connections: list[MessageConnection[SupervisorRequest]] = []
        self._control = protocol.listen(str(Path(folder) / "control.sock"))
        self._selector.register(self._control, selectors.EVENT_READ)
        self.workers = WorkerManager(folder, config, self._selector, self._broadcast)
        provider = LocalProvider(self.workers)
        self.controller = Controller(provider, provider.targets, time.monotonic)
        self.probes = GrammarProbes(folder)
        self.api_servers = [
            self._api_server(ApiServerOptions(
                config=config,
                control=self._control.getsockname(),
                listener=listener.fileno(),
                index=index,
                shared=shared,
            ))
            for index in range(config.workers)
        ]  # fmt: skip

    @staticmethod
    def _api_server(options: ApiServerOptions) -> ManagedProcess:
        name = f"API server {options.index}"
        return ManagedProcess(name, lambda: managed_process.spawn(API_MODULE, options, pass_fds=(options.listener,)))

    def run(self, on_ready: Callable[[ModelInfo | None], None], planned_free: int = 0) -> int:
        """Serve until a signal, or until an API server or the default model cannot start. Return an exit status.

        `on_ready` is called once: when the default model is loaded, or at once with None if it is loaded on demand.
        `planned_free`: the bytes of memory that the default model was planned for; 0: what is free when it is loaded.
        """
        default = None
        if self.default.preload:
            default = self.workers.acquire(acquire_request(self.default, self.config))
            default.planned_free = planned_free
        else:
            on_ready(None)
        try:
            while not self.stopping:
                self._selector.select(POLL_SECONDS)
                self._serve_control()
                self.workers.tick()
                self.controller.tick()
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
        finally:
            self.stop()
        return 0

    def stop(self) -> None:
        """Drain and stop the API servers, then stop the workers. A second signal ends draining."""
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
        self._listener.close()  # refuse connections that were not accepted yet
        self.probes.stop()
        self.workers.stop(STOP_SECONDS)
        for connection in self._connections:
            connection.close()
        self._control.close()
        self._selector.close()

    def _serve_control(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted, _ = self._control.accept()
                connection = MessageConnection(accepted, supervisor_decoder(), self._selector)
                self._connections.append(connection)
                for report in self.workers.reports():
                    connection.send(report)
        for connection in list(self._connections):
            connection.flush()
            for message in connection.receive():
                match message:
                    case AcquireModel():
                        connection.send(self.workers.acquire(message).state())
                    case ReleaseModel(key):
                        self.workers.release(key)
                    case DrainReplica(id, grace):
                        self.workers.drain(id, grace)
                    case ClearSuspect(key, fingerprint):
                        self.workers.clear_suspect(key, fingerprint)
                    case AcquireProbe(options):
                        self.probes.acquire(options)
            if not connection.open:
                self._connections.remove(connection)

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
) -> int:
    """Serve until SIGTERM or SIGINT. Return an exit status.

    `prepare` creates what the API servers share in the runtime directory, and returns its paths. `planned_free`: see
    `Supervisor.run`.
    """
    logs.configure(config.log_level, config.log_format, prompts=config.log_prompts)
    logger.info("listening host=%s port=%d", *listener.getsockname()[:2])
    with runtime_dir() as folder:
        supervisor = Supervisor(config, default, listener, folder, prepare(folder))

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
