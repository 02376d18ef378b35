"""A response's body on its way out, from code that cannot wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from typing import Any

from starlette.types import Send

from syringa.http.server.request_cycle import Exchange
from syringa.sweep import BROKEN, this_sweep

MOST_WAITING = 8 << 20  # bytes for one client that does not read


class ClientGone(Exception):
    """The connection broke while we were writing to it."""


class Outlet:
    """Sends a stream's parts in order.

    What several streams put in one turn of the event loop, which is what one step of the engine made, is sent at the
    end of that turn: first all the work, then all the writes, each of which lets another process run. Each part is a
    message of its own, or with an `Exchange` a chunk of its own in one write.

    ASGI's `send` is a coroutine, but it has to wait only for a client that reads too slowly: it is run on the spot, and
    where it stops in the middle, a task finishes it and sends what came since. A connection that is known to be broken
    raises `ClientGone`.
    """

    __slots__ = (
        "_broken",
        "_exchange",
        "_headers",
        "_parts",
        "_send",
        "_started",
        "_straight",
        "_sweep",
        "_task",
        "_waiting",
        "begun",
        "used",
    )  # fmt: skip

    def __init__(
        self, send: Send, straight: Send, headers: list[tuple[bytes, bytes]], exchange: Exchange | None = None
    ) -> None:
        """`straight` is `send` for all but the beginning. With an `exchange`, what can be sent without waiting goes
        straight to it."""
        self.begun = False
        self.used = False  # since somebody has set it so
        self._send, self._straight, self._headers, self._exchange = send, straight, headers, exchange
        self._sweep = this_sweep()
        self._parts: list[bytes] = []
        self._started = False
        self._broken = False
        self._waiting = 0  # bytes that came since the client stopped reading
        self._task: asyncio.Task[None] | None = None

    def put(self, body: bytes) -> None:
        if self._broken:
            raise ClientGone
        self.begun = self.used = True
        self._parts.append(body)
        if self._task is not None:
            self._waiting += len(body)
            if self._waiting > MOST_WAITING:
                self._broken = True  # it may be alive, but it does not read
                raise ClientGone
        elif len(self._parts) == 1:
            self._sweep.at_end(self.flush)

    def voice(self, texts: Sequence[bytes | None], before: bytes, after: bytes) -> Voice:
        """What puts one of `texts` between two others."""
        return Voice(self, self._exchange, texts, before, after)

    @property
    def behind(self) -> bool:
        """Whether the client has yet to read what was sent."""
        return self._task is not None

    def finish(self, parts: Sequence[bytes]) -> bool:
        """Sends the last parts, with what is left, if it can be done without waiting."""
        if self._broken:
            raise ClientGone
        if not self._started or self._task is not None or self._exchange is None:
            return False
        try:
            done = self._exchange.finish([*self._parts, *parts])
        except BROKEN as error:
            raise ClientGone from error
        if done:
            self._parts.clear()
        return done

    async def end(self, parts: Sequence[bytes]) -> None:
        """The same, however long it takes."""
        if self._task is not None:
            await self._task
        if self._broken:
            raise ClientGone
        self.begun = True
        last = [*self._parts, *parts] or [b""]
        self._parts.clear()  # a flush that is due finds nothing
        try:
            await self._start()
            for place, part in enumerate(last, 1):
                await self._pass_on(part, more=place < len(last))
        except BROKEN as error:
            raise ClientGone from error

    def close(self) -> None:
        """Nothing more is sent."""
        self._parts.clear()
        if self._task is not None:
            self._task.cancel()

    def flush(self) -> None:
        if not self._parts or self._task is not None:
            return
        try:
            if self._started and self._exchange is not None and self._exchange.write(self._parts):
                self._parts.clear()
                return
            sending = self._send_all()
            stopped_at = sending.send(None)
        except StopIteration:
            return
        except BROKEN:
            self._broken = True
            return
        self._task = asyncio.create_task(self._catch_up(_Rest(sending, stopped_at)))

    async def _send_all(self) -> None:
        await self._start()
        while self._parts:
            if self._exchange is not None and self._exchange.write(self._parts):
                self._parts.clear()
            else:
                await self._pass_on(self._parts.pop(0), more=True)

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _pass_on(self, part: bytes, *, more: bool) -> None:
        await self._straight({"type": "http.response.body", "body": part, "more_body": more})

    async def _catch_up(self, rest: _Rest) -> None:
        try:
            await rest
        except BROKEN:
            self._broken = True
        finally:
            self._task, self._waiting = None, 0


class Voice:
    """Puts a token's text into an outlet, with what is around it.

    Most tokens of most streams come this way, with those of all other streams of their step: if nothing is in the way,
    the text goes to the connection as soon as they all are ready.
    """

    __slots__ = ("_after", "_before", "_exchange", "_outlet", "_sweep", "_texts", "said")

    def __init__(
        self, outlet: Outlet, exchange: Exchange | None, texts: Sequence[bytes | None], before: bytes, after: bytes
    ) -> None:
        self._outlet, self._exchange, self._sweep = outlet, exchange, this_sweep()
        self._texts, self._before, self._after = texts, before, after
        self.said = 0

    def __call__(self, token: int) -> bool:
        texts = self._texts
        if not 0 <= token < len(texts) or (text := texts[token]) is None:
            return False
        self.said += 1
        body = self._before + text + self._after
        outlet, exchange = self._outlet, self._exchange
        if (
            self._sweep.held
            and not outlet._parts
            and outlet._task is None
            and exchange is not None
            and exchange.flowing
            and not exchange.flow.write_paused
        ):
            outlet.used = True
            self._sweep.write(exchange.transport.write, b"%x\r\n%b\r\n" % (len(body), body))
        else:
            outlet.put(body)
        return True


class _Rest:
    """A coroutine that was started by hand, to be awaited from where it stopped."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], stopped_at: Any) -> None:
        self._coroutine, self._stopped_at = coroutine, stopped_at

    def __await__(self) -> Generator[Any, Any, None]:
        waited = self._stopped_at
        try:
            while True:
                try:
                    result = yield waited
                except BaseException as error:
                    waited = self._coroutine.throw(error)
                else:
                    waited = self._coroutine.send(result)
        except StopIteration:
            return
