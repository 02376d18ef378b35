"""A worker for a single process: `syringa complete` and `syringa chat` without a server."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from syringa.config import Config, single_model_spec
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.cpu.features import available_memory
from syringa.engine.processes import managed_process
from syringa.engine.processes.worker_process import spawn_worker
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import StartupError


@contextlib.asynccontextmanager
async def start_local(config: Config, free_memory: int = 0) -> AsyncIterator[WorkerClient]:
    """Run a worker process for the configured model, and stop it at the end. Raises `StartupError`.

    `free_memory`: the bytes that the model's memory was planned for; 0: those that are free now.
    """
    with tempfile.TemporaryDirectory(prefix="syringa-") as folder:
        path = str(Path(folder) / "worker.sock")
        options = WorkerOptions.from_config(single_model_spec(config), config, path)
        options = msgspec.structs.replace(options, free_memory=free_memory or available_memory())
        process = spawn_worker(options)
        client = WorkerClient(f"unix:{path}")
        client.start()
        try:
            waiting = asyncio.create_task(client.wait_ready())
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.1)
                if process.poll() is not None:
                    waiting.cancel()
                    reported = process.returncode in managed_process.REPORTED_STATUSES
                    raise StartupError("" if reported else f"the model worker ended with status {process.returncode}")
            yield client
        finally:
            await client.close()
            await asyncio.to_thread(managed_process.terminate, process, 5.0)
