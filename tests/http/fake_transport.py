"""An `HttpConnection` on a transport without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from syringa.http.server.connection import HttpConnection
from syringa.http.server.limits import ConnectionLimits
from syringa.http.server.read_scheduler import ReadScheduler


class FakeTransport(asyncio.Transport):
    """Records what is written, one entry per write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = self.ended = self.reading_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.closed
        self.writes.append(bytes(data))

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    @property
    def text(self) -> bytes:
        return b"".join(self.writes)


class ManualLoop:
    """Runs the callbacks of a `ReadScheduler` when the test says so: one turn at a time."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def run_turn(self) -> bool:
        """Run what is due. Return whether there was anything."""
        due, self._callbacks = self._callbacks, []
        for callback in due:
            callback()
        return bool(due)


def create_connection(app: Any, loop: ManualLoop | None = None) -> tuple[HttpConnection, FakeTransport]:
    config = Config(app, lifespan="off", log_config=None, access_log=False, interface="asgi3", ws="none")
    limits, reads = ConnectionLimits(0.0, 100), ReadScheduler(cast(Any, loop) or asyncio.get_running_loop())
    connection = HttpConnection(limits, reads, config=config, server_state=ServerState(), app_state={})
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport
