"""`syringa serve`: starts the model worker and the API processes, starts again what dies, ends everything together."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa.config import Config
from syringa.engine import child, protocol
from syringa.engine.worker import WorkerOptions
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.supervisor")

API_MODULE = "syringa.http.process"
WORKER_MODULE = "syringa.engine.worker"
# A child that dies again and again waits this long, twice as long each time, up to the last.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
HEALTHY_SECONDS = 30.0  # one that lived this long starts again without a pause
POLL_SECONDS = 0.05


class ApiOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an API process needs to know. Travels by pipe, because the settings hold keys."""

    config: Config
    worker_socket: str
    listener: int  # the descriptor of the socket that it answers on


class Child:
    """A process that should be running."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.name = name
        self._start = start
        self._pause = FIRST_PAUSE
        self._next = 0.0
        self._begun = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def tend(self) -> int | None:
        """Starts it if it is due. Returns the exit status if it has just ended."""
        now = time.monotonic()
        if self.process is None:
            if now >= self._next:
                self.process = self._start()
                self._begun = now
            return None
        status = self.process.poll()
        if status is None:
            return None
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None
        if now - self._begun > HEALTHY_SECONDS:
            self._pause = FIRST_PAUSE
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return status

    def stop(self, grace: float) -> None:
        if self.process is not None:
            child.stop(self.process, grace)
            self.process = None


class Supervisor:
    def __init__(self, config: Config, listener: socket.socket, folder: str) -> None:
        path = str(Path(folder) / "worker.sock")
        options = WorkerOptions.from_config(config, path)
        api = ApiOptions(config=config, worker_socket=path, listener=listener.fileno())
        self.config = config
        self.worker_socket = path
        self.worker = Child("the model worker", lambda: child.spawn(WORKER_MODULE, options))
        self.apis = [
            Child("an API process", lambda: child.spawn(API_MODULE, api, keep=(listener.fileno(),)))
            for _ in range(config.workers)
        ]
        self.ending = threading.Event()
        self.was_ready = False

    def run(self, on_ready: Callable[[ModelInfo], None]) -> int:
        """Until a signal, or until something shows that it can never work."""
        threading.Thread(target=self._tell_when_ready, args=(on_ready,), daemon=True).start()
        try:
            while not self.ending.wait(POLL_SECONDS):
                for each in (self.worker, *self.apis):
                    status = each.tend()
                    if status == child.CANNOT_START:
                        return 1  # it has said why
                    if status is not None and each is self.worker and not self.was_ready:
                        print(f"syringa: the model could not be loaded: {_reason(status)}", file=sys.stderr)
                        return 1
                    if status is not None:
                        logger.error("%s ended (%s): starting it again", each.name, _reason(status))
        finally:
            self.stop()
        return 0

    def stop(self) -> None:
        """API processes first: they finish what they stream, and need the worker for it."""
        for each in self.apis:
            if each.process is not None and each.process.poll() is None:
                each.process.terminate()
        for each in self.apis:
            each.stop(self.config.drain_timeout + 2)
        self.worker.stop(5.0)

    def _tell_when_ready(self, on_ready: Callable[[ModelInfo], None]) -> None:
        frames = protocol.client_frames()
        while not self.ending.is_set():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self.worker_socket)
                while data := connection.recv(65536):
                    for message in frames.feed(data):
                        if isinstance(message, protocol.Ready):
                            self.was_ready = True
                            on_ready(message.info)
                            return
            time.sleep(POLL_SECONDS)


def run(config: Config, listener: socket.socket, on_ready: Callable[[ModelInfo], None]) -> int:
    """Serves until SIGTERM or SIGINT. The result is an exit status."""
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="syringa-") as folder:
        supervisor = Supervisor(config, listener, folder)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.ending.set())
        return supervisor.run(on_ready)


def _reason(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
        return f"signal {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"signal {-status}"
