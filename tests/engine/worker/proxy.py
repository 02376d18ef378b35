"""A TCP proxy that behaves like a bad network: it delays, cuts into pieces, stalls, corrupts and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from syringa.engine.client.transport import parse_address

READ_SIZE = 1 << 16


class Proxy:
    """Forwards connections to one address. The attributes may be changed at any time."""

    def __init__(self, target: str) -> None:
        self.target = parse_address(target)
        self.address = ""
        self.delay = 0.0  # seconds before each piece
        self.piece = READ_SIZE  # bytes per piece
        self.drop_pieces = 0  # next pieces from the worker that are lost
        self.blackhole = False  # whether all data is lost, in both directions, without an error
        self.forwarded = 0  # bytes from the worker to clients
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        """Forward nothing, and keep all connections open."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                self.resume()
                self.cut()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                worker_reader, worker_writer = await asyncio.open_connection(self.target.host, self.target.port)
                self._writers.add(worker_writer)
                try:
                    await asyncio.gather(
                        self._forward(reader, worker_writer, from_worker=False),
                        self._forward(worker_reader, writer, from_worker=True),
                    )
                finally:
                    worker_writer.transport.abort()
                    self._writers.discard(worker_writer)
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_worker: bool) -> None:
        while data := await reader.read(READ_SIZE):
            size = self.piece
            for at in range(0, len(data), size):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._flowing.wait()
                piece = data[at : at + size]
                if self.blackhole:
                    continue
                if from_worker and self.drop_pieces:
                    self.drop_pieces -= 1
                    continue
                writer.write(piece)
                await writer.drain()
                self.forwarded += len(piece) * from_worker
        raise ConnectionResetError  # ends the other direction as well
