"""The client of a model's grammar probe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from syringa.engine.client import protocol
from syringa.engine.structured_output.probe_protocol import CancelCheck, CheckGrammar, Verdict, verdict_decoder
from syringa.errors import EngineOverloaded, EngineUnavailable, InvalidRequest
from syringa.types import Grammar

logger = logging.getLogger("syringa.api")

CONNECT_SECONDS = 30.0  # for a probe to start
CHECK_SECONDS = 30.0  # for a verdict, most of which is time in the queue of the tenant
RETRY_SECONDS = 0.05
ATTEMPTS = 2  # a probe that ends is started again


class ProbeClient:
    """The client of the probe at `path`. `acquire` asks the supervisor to start it if it does not run."""

    def __init__(self, path: str, acquire: Callable[[], None]) -> None:
        self._path, self._acquire = path, acquire
        self._connection: _ProbeConnection | None = None
        self._connecting: asyncio.Task[_ProbeConnection] | None = None
        self._last_id = 0

    async def check(self, grammar: Grammar, tenant: str, cache_key: bytes, *, background: bool = False) -> int:
        """Return the memory that a grammar takes when it is compiled, in bytes.

        One in the `background` waits for as long as others are checked. Raises `InvalidRequest` for a grammar that
        cannot be compiled within the limits, `EngineOverloaded` if the tenant has too many grammars in the queue, and
        `EngineUnavailable` if the probe does not run.
        """
        self._last_id += 1
        message = CheckGrammar(self._last_id, grammar, tenant, cache_key, background)
        for _ in range(ATTEMPTS):
            connection = await self._connect()
            verdict = await connection.ask(message)
            if verdict is not None:
                if verdict.outcome == "exceeded":
                    logger.info("grammar refused, its compilation exceeds the limits: organization=%s", tenant)
                return _memory(verdict)
        raise EngineUnavailable("Grammars cannot be checked at the moment: try again shortly.")

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connect(self) -> _ProbeConnection:
        if self._connection is not None and not self._connection.lost:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open(), name="probe-connection")
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    def _connected(self, task: asyncio.Task[_ProbeConnection]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()

    async def _open(self) -> _ProbeConnection:
        loop = asyncio.get_running_loop()
        self._acquire()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while True:
                    try:
                        return (await loop.create_unix_connection(_ProbeConnection, self._path))[1]
                    except OSError:
                        await asyncio.sleep(RETRY_SECONDS)
                        self._acquire()  # it may have ended since
        except TimeoutError:
            raise EngineUnavailable("Grammars cannot be checked at the moment: try again shortly.") from None


class _ProbeConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = False
        self._decoder = verdict_decoder()
        self._waiting: dict[int, asyncio.Future[Verdict | None]] = {}

    async def ask(self, message: CheckGrammar) -> Verdict | None:
        """Return the verdict; None if the probe ended before."""
        future: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        self._transport.write(protocol.frame(message))
        try:
            async with asyncio.timeout(None if message.background else CHECK_SECONDS):
                return await future
        except TimeoutError:
            raise _overloaded() from None
        finally:
            if self._waiting.pop(message.id, None) is not None and not self.lost:
                self._transport.write(protocol.frame(CancelCheck(message.id)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop does not declare its transports as such

    def data_received(self, data: bytes) -> None:
        for verdict in self._decoder.feed(data):
            future = self._waiting.pop(verdict.id, None)
            if future is not None and not future.done():
                future.set_result(verdict)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        self._transport.close()


def _memory(verdict: Verdict) -> int:
    if verdict.outcome == "overloaded":
        raise _overloaded()
    if verdict.outcome != "valid":
        raise InvalidRequest(verdict.message, code="invalid_grammar")
    return verdict.memory


def _overloaded() -> EngineOverloaded:
    return EngineOverloaded("Too many grammars are being checked: try again shortly.")
