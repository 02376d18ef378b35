"""An engine for one process and its own use: `syringa complete` and `syringa chat` without a server."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from syringa.config import Config, sole_spec
from syringa.engine import child
from syringa.engine.client import WorkerClient
from syringa.engine.worker import WorkerOptions
from syringa.errors import StartupError


@contextlib.asynccontextmanager
async def start_local(config: Config) -> AsyncIterator[WorkerClient]:
    """Loads the model in a worker process; the worker and its memory are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="syringa-") as folder:
        path = str(Path(folder) / "worker.sock")
        process = child.spawn("syringa.engine.worker", WorkerOptions.of(sole_spec(config), config, path))
        client = WorkerClient(path)
        client.start()
        try:
            waiting = asyncio.create_task(client.wait_ready())
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.1)
                if process.poll() is not None:
                    waiting.cancel()
                    said = process.returncode in child.SAID
                    raise StartupError("" if said else f"the model worker ended with status {process.returncode}")
            yield client
        finally:
            await client.close()
            await asyncio.to_thread(child.stop, process, 5.0)
