"""Cancelling what a task does, with an error of the caller's choice: deadlines, shutdown and disconnected clients."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from syringa.http.server.request_cycle import RequestCycle
from syringa.http.streaming.writer import ClientDisconnected


class CancelScope:
    """A `with` block that other code can cancel: the task is cancelled, and the block raises the given error.

    A cancellation by other means remains a `CancelledError`. The task itself must not call `cancel`.
    """

    __slots__ = ("_cancelling", "_error", "_task", "_timer")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: Exception | None = None
        self._cancelling = 0
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self, error: Exception) -> None:
        """Cancel the block. Only the first call has an effect, and none after the block has ended."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def cancel_after(self, seconds: float, error: Exception) -> None:
        """Cancel the block if it takes longer than `seconds` from now."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cancel, error)

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if self._error is None:
            return
        assert task is not None
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None


class DisconnectGuard(CancelScope):
    """Cancels the block with `ClientDisconnected` when the client disconnects."""

    __slots__ = ("_cycle", "_receive", "_watcher")

    def __init__(self, receive: Receive, cycle: RequestCycle | None) -> None:
        """Without a `cycle`, on another ASGI server, a task waits for `http.disconnect`."""
        super().__init__()
        self._receive, self._cycle = receive, cycle
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._cycle is None:
            self._watcher = asyncio.create_task(_wait_for_disconnect(self._receive))
            self._watcher.add_done_callback(self._disconnected)
        elif self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(self._disconnected)
        else:
            self._cycle.on_disconnect = self._disconnected
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        elif self._cycle is not None:
            self._cycle.on_disconnect = None
        super().__exit__(kind, error, at)

    def _disconnected(self, _: object = None) -> None:
        self.cancel(ClientDisconnected())


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
