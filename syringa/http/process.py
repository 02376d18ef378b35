"""The process that answers HTTP: `python -m syringa.http.process`, started by the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys

import uvloop

from syringa.api.model import FixedModels, ServedModel, load_model
from syringa.engine import child
from syringa.engine.client import WorkerClient
from syringa.engine.interface import Engine, Sole
from syringa.engine.supervisor import ApiOptions
from syringa.errors import StartupError, SyringaError
from syringa.http.server import serve_api
from syringa.service.work import Work


async def answer(options: ApiOptions) -> None:
    client = WorkerClient(options.worker_socket)
    client.start()
    try:
        model = await asyncio.to_thread(load_model, options.config)
        gc.freeze()
        learning = asyncio.create_task(_learn_limits(client, model))
        listener = socket.socket(fileno=options.listener)
        await serve_api(options.config, Sole(client), FixedModels([model]), listener, Work(options.config))
        learning.cancel()
    finally:
        await client.close()


async def _learn_limits(engine: Engine, model: ServedModel) -> None:
    """The worker knows how long a sequence its cache can hold; the files only what the model was made for."""
    with contextlib.suppress(SyringaError):
        info = await engine.wait_ready()
        model.max_model_len = min(model.max_model_len, info.max_model_len)


def main() -> None:
    options = child.begin(ApiOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every child; the supervisor decides what ends when
    logging.basicConfig(
        level=options.config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # What a token makes is gone before the next one comes, without the collector's help; what was loaded, it would go
    # through again and again for nothing.
    gc.set_threshold(50_000, 20, 50)
    try:
        uvloop.run(answer(options))
    except StartupError as error:
        print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(child.CANNOT_START)


if __name__ == "__main__":
    main()
