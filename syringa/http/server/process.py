"""The process that answers HTTP: `python -m syringa.http.server.process`, started by the supervisor."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

import uvloop

from syringa import logs
from syringa.api.fields.defaults import read_defaults
from syringa.api.models.registry import Registry
from syringa.engine.client.engines import LocalFleet
from syringa.engine.processes import managed_process
from syringa.engine.processes.supervisor import ApiOptions
from syringa.errors import StartupError
from syringa.http.server.server import serve_api
from syringa.service.app_state import Work
from syringa.service.model_catalog import Catalogue

PRIORITY = -5  # above a model's threads, which keep every core busy


def come_first() -> None:
    """Clients that are written to should not have to wait for the model, nor interrupt the writing. Only a privileged
    process may ask for this; others do without."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))


async def answer(options: ApiOptions) -> None:
    config = options.config
    fleet = LocalFleet(options.control, config)
    models = Registry(config, status=fleet.status, changed=fleet.set_specs)
    fleet.loaded = lambda model, info: models.learn(model, info.max_model_len)
    await fleet.start()
    try:
        await models.start()
        gc.freeze()
        listener = socket.socket(fileno=options.listener)
        work = Work(config, limits=options.shared.limits, metrics=options.shared.metrics, index=options.index)
        work.price = models.prices
        work.catalogue = Catalogue(work.state.database, config, models.replace, read_defaults)
        await serve_api(config, fleet, models, listener, work)
    finally:
        await fleet.close()


def main() -> None:
    options = managed_process.begin(ApiOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every child; the supervisor decides what ends when
    come_first()
    config = options.config
    logs.configure(config.log_level, config.log_format, prompts=config.log_prompts)
    # What a token makes is gone before the next one comes, without the collector's help; what was loaded, it would go
    # through again and again for nothing.
    gc.set_threshold(50_000, 20, 50)
    try:
        uvloop.run(answer(options))
    except StartupError as error:
        print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(managed_process.CANNOT_START)


if __name__ == "__main__":
    main()
