"""The API server process, started by the supervisor as `python -m syringa.http.server.process`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import sys

import uvloop

from syringa import logs
from syringa.api.fields.defaults import read_defaults
from syringa.api.models.registry import ModelRegistry
from syringa.api.models.served_model import GrammarCheck
from syringa.engine.client.engines import ModelEngines
from syringa.engine.processes import managed_process
from syringa.engine.processes.supervisor import ApiServerOptions
from syringa.errors import StartupError
from syringa.generation import cache_key
from syringa.http.server.request_threads import RequestThreads
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog
from syringa.store import Store
from syringa.types import Grammar, in_background

PRIORITY = -5  # above the threads of a model on the CPU, which keep every core busy


def raise_priority() -> None:
    """Raise the scheduling priority of this process, so that responses do not wait for CPU time of the model.

    Has no effect in an unprivileged process.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))


async def run_api_server(options: ApiServerOptions) -> None:
    config = options.config
    asyncio.get_running_loop().set_default_executor(RequestThreads())
    engines = ModelEngines(options.control, config)

    def check_grammar(model: str) -> GrammarCheck:
        async def check(grammar: Grammar, tenant: str, salt: str | None) -> int:
            key = cache_key(None if config.share_prefix_cache else tenant, salt)
            return await engines.check_grammar(model, grammar, tenant, key, background=in_background.get())

        return check

    models = ModelRegistry(
        config,
        status=engines.status,
        loading=engines.loading,
        on_change=engines.set_specs,
        check_grammar=functools.cache(check_grammar),
    )
    engines.on_loaded = lambda model, info: models.set_max_model_len(model, info.max_model_len)
    await engines.start()
    try:
        await models.start()
        gc.freeze()
        listener = socket.socket(fileno=options.listener)
        store = Store(config.database)
        app_state = AppState(
            config,
            store=store,
            catalog=ModelCatalog(store, config, models.set_added, read_defaults),
            prices=models.prices,
            limits_file=options.shared.limits,
            metrics_folder=options.shared.metrics,
            index=options.index,
        )
        engines.on_move = app_state.metrics.count_move
        engines.on_route = app_state.metrics.count_route
        ollama = socket.socket(fileno=options.ollama_listener) if options.ollama_listener >= 0 else None
        await serve_api(config, engines, models, listener, app_state, ollama)
    finally:
        await engines.close()


def main() -> None:
    options = managed_process.attach_to_parent(ApiServerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the supervisor stops them in order
    raise_priority()
    config = options.config
    logs.configure(config.log_level, config.log_format, prompts=config.log_prompts)
    # The objects of a token are freed by reference counting. Frequent collections would traverse long-lived objects in
    # vain.
    gc.set_threshold(50_000, 20, 50)
    try:
        uvloop.run(run_api_server(options))
    except StartupError as error:
        print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(managed_process.EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
