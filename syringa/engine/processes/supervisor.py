"""`syringa serve`: starts API processes, and model workers as they are wanted; starts again what dies, and ends
everything together."""

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
from syringa.engine.processes.control import Drop, Link, State, ToSupervisor, Want, supervisor_frames
from syringa.engine.processes.managed_process import Child
from syringa.engine.processes.manager import ModelWorkers
from syringa.engine.processes.runtime_dir import scratch
from syringa.engine.worker.server import WorkerOptions
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.supervisor")

API_MODULE = "syringa.http.server.process"
POLL_SECONDS = 0.05
DRAIN_MARGIN = 5.0  # for an API process to tell who is left and to end, beyond the time that its requests get
SAME_SIGNAL_SECONDS = 0.6  # an API process takes two that are nearer for one
STOP_SECONDS = 5.0  # for workers to end, once nobody needs them


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What the API processes of a server share. The supervisor passes it on, and knows no more of it."""

    limits: str | None = None  # a file, by which they hold everybody to their limits together
    metrics: str | None = None  # a folder, in which they count together


class ApiOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an API process needs to know. Travels by pipe, because the settings hold keys."""

    config: Config
    control: str  # the socket on which it asks for workers
    listener: int  # the descriptor of the socket that it answers on
    index: int = 0  # which of the API processes it is
    shared: Shared = Shared()


class Supervisor:
    def __init__(
        self, config: Config, default: ModelSpec, listener: socket.socket, folder: str, shared: Shared = Shared()
    ) -> None:
        """`default`: the model without which the server does not start, if it is to be loaded at the start."""
        self.config, self.default = config, default
        self.ending = self.hurried = False
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._links: list[Link[ToSupervisor]] = []
        self._door = protocol.listen(str(Path(folder) / "control.sock"))
        self._selector.register(self._door, selectors.EVENT_READ)
        self.workers = ModelWorkers(folder, config, self._selector, self._tell_all)
        self.apis = [
            self._api(ApiOptions(
                config=config,
                control=self._door.getsockname(),
                listener=listener.fileno(),
                index=index,
                shared=shared,
            ))
            for index in range(config.workers)
        ]  # fmt: skip

    @staticmethod
    def _api(options: ApiOptions) -> Child:
        return Child("an API process", lambda: managed_process.spawn(API_MODULE, options, keep=(options.listener,)))

    def run(self, on_ready: Callable[[ModelInfo | None], None]) -> int:
        """Until a signal, or until something shows that it can never work. `on_ready` is called once: when the default
        model is loaded, or at once with None if it is only loaded when somebody wants it."""
        first = None
        if self.default.preload:
            options = WorkerOptions.of(self.default, self.config)
            want = Want(options, self.default.idle_seconds or 0.0, keep=True, name=self.default.id)
            first = self.workers.want(want)
        else:
            on_ready(None)
        try:
            while not self.ending:
                self._selector.select(POLL_SECONDS)
                self._converse()
                self.workers.tick()
                if first is not None and first.phase == "failed":
                    if not first.told:
                        print(f"syringa: the model could not be loaded: {first.reason}", file=sys.stderr)
                    return 1
                if first is not None and first.info is not None:
                    on_ready(first.info)
                    first = None
                for each in self.apis:
                    status = each.tend()
                    if status == managed_process.CANNOT_START:
                        return 1  # it has said why
                    if status is not None:
                        logger.error("%s ended (%s): starting it again", each.name, managed_process.tell_exit(status))
        finally:
            self.stop()
        return 0

    def stop(self) -> None:
        """API processes first: they finish what they have, and need the workers for it, even some that still load. A
        second signal hurries them."""
        running = [each.process for each in self.apis if each.process is not None]
        if not self.ending:  # a server that could not start has nothing to finish, and has said all there is to say
            for process in running:
                process.kill()
        asked = _terminate(running)
        deadline = asked + self.config.drain_timeout + DRAIN_MARGIN
        while any(process.poll() is None for process in running) and (now := time.monotonic()) < deadline:
            if self.hurried and now - asked > SAME_SIGNAL_SECONDS:
                self.hurried = False
                deadline = min(deadline, _terminate(running) + DRAIN_MARGIN)
            self._selector.select(POLL_SECONDS)
            if self.ending:
                self._converse()
                self.workers.tick()
            else:
                time.sleep(POLL_SECONDS)  # it starts nothing more
        for each in self.apis:
            each.stop(0.0)
        self._listener.close()  # who still waits to be let in finds out now
        self.workers.stop(STOP_SECONDS)
        for link in self._links:
            link.close()
        self._door.close()
        self._selector.close()

    def _converse(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._door.accept()
                link = Link(connection, supervisor_frames(), self._selector)
                self._links.append(link)
                for state in self.workers.states():
                    link.send(state)
        for link in list(self._links):
            link.flush()
            for message in link.receive():
                match message:
                    case Want():
                        link.send(self.workers.want(message).state())
                    case Drop(key):
                        self.workers.drop(key)
            if not link.open:
                self._links.remove(link)

    def _tell_all(self, state: State) -> None:
        for link in self._links:
            link.send(state)


def run(
    config: Config,
    default: ModelSpec,
    listener: socket.socket,
    on_ready: Callable[[ModelInfo | None], None],
    prepare: Callable[[str], Shared] = lambda folder: Shared(),
) -> int:
    """Serves until SIGTERM or SIGINT. The result is an exit status.

    `prepare` makes what the API processes share, in a folder that lasts as long as they do, and says where it is.
    """
    logs.configure(config.log_level, config.log_format, prompts=config.log_prompts)
    with scratch() as folder:
        supervisor = Supervisor(config, default, listener, folder, prepare(folder))

        def end(*_: object) -> None:
            supervisor.hurried, supervisor.ending = supervisor.ending, True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        return supervisor.run(on_ready)


def _terminate(processes: list[subprocess.Popen[bytes]]) -> float:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    return time.monotonic()
