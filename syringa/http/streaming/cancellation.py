"""Ends what a task is doing, from outside, with an error of one's choice."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope

from syringa.http.streaming.writer import ClientGone


class Interruption:
    """Inside, the task may be told `now`: it stops where it waits, cleans up as if it were cancelled, and the error
    comes out here. A cancellation by anybody else stays one. `now` is not to be called by the task itself."""

    __slots__ = ("_cancelling", "_error", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: Exception | None = None
        self._cancelling = 0

    def now(self, error: Exception) -> None:
        """Only the first one counts, and none once the block was left."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._error is None:
            return
        assert task is not None
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None


class Presence(Interruption):
    """The client of a request, while it is being answered: when it leaves, the block ends with `ClientGone`."""

    __slots__ = ("_exchange", "_receive", "_watching")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__()
        self._exchange = scope["state"].get("exchange")
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None

    def leave(self, _: object = None) -> None:
        self.now(ClientGone())

    def __enter__(self) -> Self:
        super().__enter__()
        if self._exchange is None:  # another server than ours, which has to be asked
            self._watching = asyncio.create_task(_disconnect(self._receive))
            self._watching.add_done_callback(self.leave)
        elif self._exchange.disconnected:
            asyncio.get_running_loop().call_soon(self.leave)
        else:
            self._exchange.left = self.leave
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        elif self._exchange is not None:
            self._exchange.left = None
        super().__exit__(kind, error, at)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
