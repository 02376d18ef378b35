"""A server of a fake engine as a process of its own, which can be killed: `python -m tests.console.fake_server`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.server.listener import listen
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.e2e.server import Server, wait_for
from tests.fake_engine import FakeEngine


class FakeServer:
    """A server that is started and killed, always on the same port, which is kept for it meanwhile."""

    def __init__(self, folder: Path, port: int) -> None:
        self._arguments = [sys.executable, "-m", __name__, str(port), str(folder / "syringa.db")]
        self._process: Popen[str] | None = None
        self._log, self._port = folder / "log", port
        self.url = f"http://127.0.0.1:{port}"

    def start(self) -> None:
        with open(self._log, "a") as log:
            self._process = Popen(self._arguments, stdout=log, stderr=log, text=True)
        server = Server(self._process, self._port, self._log)
        wait_for(lambda: server.ready() is not None)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def fake_server(folder: Path) -> Iterator[FakeServer]:
    """Start a server. Nothing else gets its port while it is stopped: a socket that does not listen has it too."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        server = FakeServer(folder, reserved.getsockname()[1])
        try:
            server.start()
            yield server
        finally:
            server.kill()


def main(port: str, database: str) -> None:
    config = Config(port=int(port), database=database)
    models = FixedModels([plain_model()])
    engines = SingleEngineProvider(FakeEngine("Hello."))
    asyncio.run(serve_api(config, engines, models, listen(config), AppState(config)))


if __name__ == "__main__":
    main(*sys.argv[1:])
