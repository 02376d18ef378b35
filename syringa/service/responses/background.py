"""Background responses: they run without a client, and their events are stored, so that any client can stream them.

A background response belongs to the process that started it. Its events are in memory at once and in the store at most
half a second later. A stream in this process reads from memory; one in another process polls the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from syringa.errors import EngineOverloaded, StoreError, StoreUnavailable
from syringa.service.responses.recorder import ResponseObject, ResponseRecorder, read_response
from syringa.store import ACTIVE, Store, StoredEvent

logger = logging.getLogger("syringa.service")

FLUSH_SECONDS = 0.5
POLL_SECONDS = 0.5
MAX_RECENT_EVENTS = 2_000  # stored events that stay in memory for streams that keep up
MAX_UNSTORED_EVENTS = 50_000  # a response whose events cannot be stored fails here, before it fills the memory
_PAGE = 1000
_FINAL_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class BackgroundResponse:
    """One background response of this process, and its events."""

    def __init__(self, recorder: ResponseRecorder) -> None:
        self.recorder = recorder
        self.cancelled = False
        self.response: ResponseObject | None = None  # the final object
        self.ended = False
        self._begun = self._finishing = False
        self._events: list[StoredEvent] = []
        self._first = 0  # the number of the first event in memory; numbers have no gaps
        self._stored = 0  # the number of the first event that is not stored
        self._changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def publish(self, events: Sequence[StoredEvent]) -> None:
        """Add events. Raises `StoreUnavailable` if too many could not be stored."""
        if self._first + len(self._events) - self._stored > MAX_UNSTORED_EVENTS:
            raise StoreUnavailable("the events of a background response could not be stored")
        self._add(events)

    async def finish(self, response: ResponseObject, events: Sequence[StoredEvent] = ()) -> None:
        """Store the end, then publish the last events. Once this has begun, it cannot be cancelled."""
        self._finishing = True
        await asyncio.shield(self.recorder.manager.spawn(self._finish(response, events)))

    async def _finish(self, response: ResponseObject, events: Sequence[StoredEvent]) -> None:
        try:
            await self.recorder.finish(response, [*self._unstored(), *events])
            self.response = response
        finally:
            self.ended = True
            self._add(events)

    def end_streams(self) -> None:
        """End all streams of a response that did not `finish`, so that they do not wait forever."""
        if not self._finishing:
            self.ended = True
            self._add(())

    async def cancel(self) -> None:
        """Cancel the response, and wait until it has ended."""
        self.request_cancel()
        if self.task is not None:
            await asyncio.wait([self.task])

    def request_cancel(self) -> None:
        """Cancel the task. `cancelled` tells this from the cancellation by a server that shuts down."""
        if self.task is not None and not self.cancelled and not self._finishing:
            self.cancelled = True
            if self._begun:  # cancelled before its first step, a task would end without `finish`
                self.task.cancel()

    def begin(self) -> None:
        """To be called in the task, before its work."""
        self._begun = True
        if self.cancelled and self.task is not None:
            self.task.cancel()  # raised where the work first waits

    async def store_events(self) -> None:
        """Store new events until this is cancelled. A batch that fails is stored with the next one."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            with contextlib.suppress(StoreError):
                if events := self._unstored():
                    await self._store_batch(events)
                    self._stored += len(events)
                    self._forget()

    async def _store_batch(self, events: Sequence[StoredEvent]) -> None:
        organization, id = self.recorder.organization, self.recorder.id
        await self.recorder.manager.store.write(lambda session: session.events.append(organization, id, events))

    async def follow(self, after: int) -> AsyncIterator[Sequence[StoredEvent]]:
        """Yield events with higher numbers than `after` as they come, until the end."""
        while True:
            changed, ended = self._changed, self.ended
            if after + 1 < self._first:
                events = await _events_after(
                    self.recorder.manager.store, self.recorder.organization, self.recorder.id, after
                )
            else:
                events = self._events[after + 1 - self._first :]
            if events:
                after = events[-1].sequence
                yield events
            elif ended:
                return
            else:
                await changed.wait()

    def _add(self, events: Sequence[StoredEvent]) -> None:
        self._events += events
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _unstored(self) -> list[StoredEvent]:
        return self._events[self._stored - self._first :]

    def _forget(self) -> None:
        old = self._stored - self._first - MAX_RECENT_EVENTS
        if old > 0:
            del self._events[:old]
            self._first += old


class BackgroundResponses:
    """The background responses of this process.

    Organizations share the `limit` equally. One may use what others leave, but one below its share is always admitted,
    even above the limit: no organization can keep another out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reserved: Counter[str] = Counter()  # by organization
        self._active: dict[tuple[str, str], BackgroundResponse] = {}

    @contextlib.contextmanager
    def reserve(self, organization: str) -> Iterator[None]:
        """Reserve capacity for a response that is about to start. Raises `EngineOverloaded`."""
        held = self._reserved + Counter(holder for holder, _ in self._active)
        share = max(1, self._limit // len(held.keys() | {organization}))
        if held.total() >= self._limit and held[organization] >= share:
            raise EngineOverloaded(
                f"{held[organization]} background responses of this organization are running, and this server allows"
                f" {self._limit} of all organizations together; try again later.",
                code="too_many_background_responses",
            )
        self._reserved[organization] += 1
        try:
            yield
        finally:
            self._reserved -= Counter({organization: 1})

    def find(self, organization: str, id: str) -> BackgroundResponse | None:
        return self._active.get((organization, id))

    def start(self, response: BackgroundResponse, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which must call `response.finish`. It is cancelled if another process ends the response."""
        key = (response.recorder.organization, response.recorder.id)
        response.task = asyncio.create_task(self._run(response, work))
        response.recorder.on_lost(response.request_cancel)
        self._active[key] = response
        response.task.add_done_callback(lambda _: self._active.pop(key, None))

    async def _run(self, response: BackgroundResponse, work: Coroutine[Any, Any, None]) -> None:
        response.begin()
        storing = asyncio.create_task(response.store_events())
        try:
            await work
        except Exception:
            logger.exception("background responses: failed: response=%s", response.recorder.id)
        finally:
            storing.cancel()
            response.end_streams()

    async def drain(self, seconds: float) -> None:
        """Give active responses some time to finish, then cancel them."""
        tasks = [response.task for response in self._active.values() if response.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def follow_stored(store: Store, organization: str, id: str, after: int) -> AsyncIterator[Sequence[StoredEvent]]:
    """Like `BackgroundResponse.follow`, for a response of another process, or one that has ended."""
    ended = False
    while True:
        events = await _events_after(store, organization, id, after)
        if events:
            after = events[-1].sequence
            yield events
            continue
        if ended:
            break
        found = await store.read(lambda session: session.responses.get(organization, id))
        ended = found is None or found.status not in ACTIVE
        if not ended:
            await asyncio.sleep(POLL_SECONDS)
    if final := await _missing_final_event(store, organization, id, after):
        yield [final]


async def _events_after(store: Store, organization: str, id: str, after: int) -> list[StoredEvent]:
    return await store.read(lambda session: session.events.after(organization, id, after, limit=_PAGE))


async def _missing_final_event(store: Store, organization: str, id: str, after: int) -> StoredEvent | None:
    """Return the final event of a response whose process exited before it stored one."""
    found = await read_response(store, organization, id)
    if found is None:  # deleted
        return None
    response = found[1]
    type_ = _FINAL_EVENTS.get(response["status"])
    last = await store.read(lambda session: session.events.last(organization, id))
    if type_ is None or (last is not None and msgspec.json.decode(last.json)["type"] in _FINAL_EVENTS.values()):
        return None
    # A stream may have seen events that the process could not store any more.
    number = max(after, last.sequence if last is not None else -1) + 1
    event = {"type": type_, "sequence_number": number, "response": response}
    return StoredEvent(number, msgspec.json.encode(event).decode())
