"""An API process: a listening socket, an app, and uvicorn between them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from syringa.api.model import Models, ServedModel, load_model
from syringa.config import Config
from syringa.engine.interface import Engine
from syringa.errors import StartupError, SyringaError
from syringa.http.app import create_app

logger = logging.getLogger("syringa.http")


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


async def serve_api(
    config: Config, engine: Engine, listener: socket.socket, *, model: ServedModel | None = None
) -> None:
    """Answers on `listener` until SIGTERM or SIGINT, then gives running requests `drain_timeout` seconds.

    The engine may still be loading; until it is ready, `/health` and generations answer 503.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    served = await asyncio.to_thread(load_model, config) if model is None else model
    app = create_app(config, engine, Models([served]))
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="debug" if config.log_level == "debug" else "warning",  # its start and end are not news
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(config.drain_timeout),
        )
    )
    learning = asyncio.create_task(_learn_limits(engine, served))
    try:
        await server.serve(sockets=[listener])
    finally:
        learning.cancel()
        await asyncio.gather(learning, return_exceptions=True)


async def _learn_limits(engine: Engine, model: ServedModel) -> None:
    """The worker knows how long a sequence its cache can hold; the files only what the model was made for."""
    with contextlib.suppress(SyringaError):
        info = await engine.wait_ready()
        model.max_model_len = min(model.max_model_len, info.max_model_len)


class _Server(uvicorn.Server):
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
