"""The API server: the app, and uvicorn between it and a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
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

import msgspec
import uvicorn

from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.engine.interface import EngineProvider
from syringa.http.app import create_app
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.server.connection import HttpConnection
from syringa.http.server.drain import GracefulShutdown
from syringa.http.server.limits import ConnectionLimits, max_connections
from syringa.http.server.read_scheduler import ReadScheduler
from syringa.http.server.websocket_connection import WebSocketConnection
from syringa.service.app_state import AppState

# Longer than the minute for which proxies keep connections: they must not use one while it is being closed.
_KEEP_ALIVE_SECONDS = 75
_DUPLICATE_SIGNAL_SECONDS = 0.5


async def serve_api(
    config: Config,
    engines: EngineProvider,
    models: Models,
    listener: socket.socket,
    app_state: AppState,
    ollama: socket.socket | None = None,
) -> None:
    """Serve on `listener` until SIGTERM or SIGINT, then give running requests `drain_timeout` seconds.

    `ollama`: the listening socket of `ollama_port`, if there is one.

    Starts and closes `app_state`. Engines may still be loading: requests for them wait.
    """
    if ollama is not None:  # the port may have been any free one
        config = msgspec.structs.replace(config, ollama_port=ollama.getsockname()[1])
    await app_state.start()
    dispatcher = GenerationDispatcher(
        engines, app_state.key_watch, config.request_timeout, share_prefix_cache=config.share_prefix_cache
    )
    limits = ConnectionLimits(config.read_timeout, max_connections())
    reads = ReadScheduler(asyncio.get_running_loop())
    server = _Server(
        uvicorn.Config(
            create_app(config, engines, models, app_state, dispatcher),
            http=cast(Any, functools.partial(HttpConnection, limits, reads)),
            ws=cast(Any, functools.partial(WebSocketConnection, limits.pool, reads)),
            ws_max_size=config.max_body_bytes,
            ws_per_message_deflate=False,  # compressing many small events costs more than it saves
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="warning",  # at lower levels uvicorn logs headers and frames
            access_log=False,
            server_header=False,
            proxy_headers=False,  # client addresses are not used
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
    )
    server.graceful_shutdown = GracefulShutdown(
        server.server_state, limits, app_state, dispatcher, config.drain_timeout
    )
    logging.getLogger("uvicorn.error").addFilter(_is_relevant)
    try:
        await server.serve(sockets=[listener] if ollama is None else [listener, ollama])
    finally:
        for listening in getattr(server, "servers", ()):
            listening.close()  # uvicorn does so too, unless it is cancelled
        await app_state.close()


def _is_relevant(record: logging.LogRecord) -> bool:
    """Filter out uvicorn's complaint about WebSocket handshakes that are rejected with an HTTP response."""
    return not record.getMessage().startswith("ASGI callable returned without completing handshake")


class _Server(uvicorn.Server):
    """uvicorn's server, without its polling loop, and with `GracefulShutdown` as its shutdown."""

    graceful_shutdown: GracefulShutdown
    _signaled_at = math.inf
    _wake: Callable[[], object] = staticmethod(lambda: None)

    async def main_loop(self) -> None:
        """Sleep until a signal arrives."""
        signaled = asyncio.Event()
        # Thread-safe, because a signal handler can interrupt the loop at any point.
        self._wake = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, signaled.set)
        while not self.should_exit:
            await signaled.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.graceful_shutdown.run(self.servers)
        for listener in sockets or ():
            listener.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; hurry it at the second signal.

        A signal to a whole process group arrives twice, directly and through the supervisor: the duplicate is ignored.
        """
        now = time.monotonic()
        self._wake()
        if not self.should_exit:
            self.should_exit, self._signaled_at = True, now
        elif now - self._signaled_at > _DUPLICATE_SIGNAL_SECONDS:
            self.graceful_shutdown.hurry = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM, without raising them again afterwards: a clean shutdown exits with status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
