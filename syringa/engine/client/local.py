"""A worker for a single process: `syringa complete` and `syringa chat` without a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from syringa.config import Config, single_model_spec
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.cpu.features import available_memory
from syringa.engine.processes import managed_process
from syringa.engine.processes.health import HealthPage, create_page
from syringa.engine.processes.worker_process import spawn_worker
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import StartupError
from syringa.types import LoadProgress


@contextlib.asynccontextmanager
async def start_local(
    config: Config, free_memory: int = 0, on_progress: Callable[[LoadProgress], None] | None = None
) -> AsyncIterator[WorkerClient]:
    """Run a worker process for the configured model, and stop it at the end. Raises `StartupError`.

    `free_memory`: the bytes that the model's memory was planned for; 0: those that are free now. `on_progress` is
    called when loading has come further; without it, the worker itself shows that on a terminal.
    """
    with tempfile.TemporaryDirectory(prefix="syringa-") as folder, contextlib.closing(_Health()) as health:
        path = str(Path(folder) / "worker.sock")
        options = WorkerOptions.from_config(single_model_spec(config), config, path)
        options = msgspec.structs.replace(
            options,
            free_memory=free_memory or available_memory(),
            health_fd=health.fd,
            progress_bar=on_progress is None,
        )
        process = spawn_worker(options)
        client = WorkerClient(f"unix:{path}")
        client.start()
        try:
            waiting = asyncio.create_task(client.wait_ready())
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.1)
                if on_progress is not None and not waiting.done():
                    on_progress(health.page.loading())
                if process.poll() is not None:
                    waiting.cancel()
                    reported = process.returncode in managed_process.REPORTED_STATUSES
                    raise StartupError("" if reported else f"the model worker ended with status {process.returncode}")
            yield client
        finally:
            await client.close()
            await asyncio.to_thread(managed_process.terminate, process, 5.0)


class _Health:
    """The health page of the worker."""

    def __init__(self) -> None:
        self.fd = create_page()
        self.page = HealthPage(self.fd)

    def close(self) -> None:
        self.page.close()
        os.close(self.fd)
