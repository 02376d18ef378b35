"""Where a call meets its model's engine: every generation of every endpoint is started here, and nowhere else."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable

from syringa.api.decoding import Call
from syringa.engine.interface import Engine, Fleet
from syringa.errors import EngineUnavailable
from syringa.events import Usage
from syringa.generation import Emit, produce
from syringa.http.middleware.access_log import heard
from syringa.http.server.drain import ENDING
from syringa.http.streaming.cancellation import Interruption
from syringa.http.streaming.writer import ClientGone
from syringa.service.usage.account import Account

Drive = Callable[[Emit], Awaitable[Usage]]


class Desk:
    def __init__(self, fleet: Fleet, timeout: float = 0.0) -> None:
        """`timeout`: the seconds that a request may take; 0: as long as it likes."""
        self.fleet = fleet
        self._timeout = timeout or None
        self._running: set[Interruption] = set()
        self._ending = False

    def drive(self, call: Call, account: Account) -> Drive:
        """What runs a call, once somebody takes its events; the result is what it used."""
        account.model, account.user = call.model.id, call.request.user
        return functools.partial(self._drive, call, account)

    def run(self, call: Call, account: Account) -> Callable[[Emit], Awaitable[None]]:
        """The same, with `Usage` as the last event."""
        drive = self.drive(call, account)

        async def run(emit: Emit) -> None:
            emit([await drive(emit)])

        return run

    def end(self) -> None:
        """The server ends: what still runs fails now, and says why."""
        self._ending = True
        for each in self._running:
            each.now(_ending())

    async def _drive(self, call: Call, account: Account, emit: Emit) -> Usage:
        try:
            return await self._bounded(call, account, emit)
        except (asyncio.CancelledError, ClientGone):
            account.cancel()
            raise
        except Exception as error:
            account.fail(error)
            raise

    async def _bounded(self, call: Call, account: Account, emit: Emit) -> Usage:
        if self._ending:
            raise _ending()
        given = [each for each in (self._timeout, account.timeout) if each is not None]
        deadline: asyncio.TimerHandle | None = None
        with Interruption() as interruption:
            if given:
                late = EngineUnavailable(f"The request took longer than {min(given):g} seconds.", code="timeout")
                deadline = asyncio.get_running_loop().call_later(min(given), interruption.now, late)
            self._running.add(interruption)
            try:
                engine = self.fleet.engine(call.model.id)
                if not engine.ready:
                    await _load(engine, account)
                with heard(emit) as emit:
                    return await produce(engine, call.model.tokenizer, call.request, emit, account.trace)
            finally:
                self._running.discard(interruption)
                if deadline is not None:
                    deadline.cancel()


def _ending() -> EngineUnavailable:
    return EngineUnavailable(ENDING, code="server_ending")


async def _load(engine: Engine, account: Account) -> None:
    """A cold model is loaded by the first request for it, which waits."""
    began = time.perf_counter()
    try:
        await engine.wait_ready()
    finally:
        account.load_seconds = time.perf_counter() - began
