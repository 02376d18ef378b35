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
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from syringa.api.model import Models
from syringa.config import Config
from syringa.engine.interface import Fleet
from syringa.errors import StartupError
from syringa.http.app import create_app
from syringa.service.work import Work
from syringa.store.location import locate

logger = logging.getLogger("syringa.http")


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


async def serve_api(config: Config, fleet: Fleet, models: Models, listener: socket.socket, work: Work) -> None:
    """Answers on `listener` until SIGTERM or SIGINT, then gives running requests `drain_timeout` seconds. Starts and
    closes `work`; engines may still be loading, and requests for them wait."""
    await work.start()
    app = create_app(config, fleet, models, work)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=config.max_body_bytes,
            ws_per_message_deflate=False,  # events are small and many: packing them costs more than it saves
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="debug" if config.log_level == "debug" else "warning",  # its start and end are not news
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks where a client is
            timeout_graceful_shutdown=math.ceil(config.drain_timeout),
        ),
        functools.partial(work.drain, config.drain_timeout),
    )
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
    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What has no client gets its time to end while those that have one get theirs."""
        await asyncio.gather(super().shutdown(sockets), self._drain())

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
