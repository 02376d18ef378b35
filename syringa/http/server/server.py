"""An API process: a listening socket, an app, and uvicorn between them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import uvicorn

from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.engine.interface import Fleet
from syringa.errors import StartupError
from syringa.http.app import create_app
from syringa.http.dispatch import Desk
from syringa.http.server.connection import Connection
from syringa.http.server.drain import Drain
from syringa.http.server.limits import Shared, room
from syringa.http.server.websocket_protocol import SocketConnection
from syringa.service.app_state import Work
from syringa.store.url import locate

# A proxy that keeps its connections for a minute must not find one closed in the moment that it uses it.
_KEEP_ALIVE_SECONDS = 75
_SAME_SIGNAL_SECONDS = 0.5


def check(config: Config) -> None:
    """Raises `StartupError` for settings that would fail later, when a client is there to see it."""
    locate(config.database)


def listen(config: Config) -> socket.socket:
    """The listening socket, bound before anything slow starts. Raises `StartupError` when the port is taken."""
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host.strip("[]"), config.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {where}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_the_dead(listener)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {config.port} on {config.host} is in use: stop what listens there, or choose another with --port"
            ) from None
        if error.errno == errno.EACCES:
            raise StartupError(f"no permission to listen on {where}: choose a port above 1023 with --port") from None
        raise StartupError(f"cannot listen on {where}: {error.strerror}") from None
    listener.set_inheritable(True)
    return listener


def _notice_the_dead(listener: socket.socket) -> None:
    """A client whose machine is gone, or that leaves what was sent unread in the kernel, is noticed after a minute or
    two. Connections inherit this from their listener."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
    for name, value in wanted.items():
        with contextlib.suppress(AttributeError, OSError):  # not every system has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def serve_api(config: Config, fleet: Fleet, models: Models, listener: socket.socket, work: Work) -> None:
    """Answers on `listener` until SIGTERM or SIGINT, then gives running requests `drain_timeout` seconds. Starts and
    closes `work`; engines may still be loading, and requests for them wait."""
    await work.start()
    desk = Desk(fleet, config.request_timeout)
    shared = Shared(config.read_timeout, room())
    server = _Server(
        uvicorn.Config(
            create_app(config, fleet, models, work, desk),
            http=cast(Any, functools.partial(Connection, shared)),
            ws=SocketConnection,
            ws_max_size=config.max_body_bytes,
            ws_per_message_deflate=False,  # events are small and many: packing them costs more than it saves
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="warning",  # its start and end are not news, and for debugging it shows headers and frames
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks where a client is
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
    )
    server.drain = Drain(server.server_state, shared, work, desk, config.drain_timeout)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    try:
        await server.serve(sockets=[listener])
    finally:
        for each in getattr(server, "servers", ()):
            each.close()  # uvicorn does so too, unless it was cancelled
        await work.close()


def _is_news(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket's handshake that we answer with a refusal for one that we forgot."""
    return not record.getMessage().startswith("ASGI callable returned without completing handshake")


class _Server(uvicorn.Server):
    drain: Drain
    _asked_at = math.inf  # to end
    _wake: Callable[[], object] = staticmethod(lambda: None)

    async def main_loop(self) -> None:
        """Sleeps until it is told to end."""
        told = asyncio.Event()
        # From a signal's handler, which runs at any moment: the loop has to be woken up.
        self._wake = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, told.set)
        while not self.should_exit:
            await told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.drain.run(self.servers)
        for each in sockets or ():
            each.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends it at once. But whoever stops a whole group of processes reaches this one twice: itself,
        and by way of the supervisor."""
        now = time.monotonic()
        self._wake()
        if not self.should_exit:
            self.should_exit, self._asked_at = True, now
        elif now - self._asked_at > _SAME_SIGNAL_SECONDS:
            self.drain.hurried = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends on the usual signals, but does not raise them again after: a clean end exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
