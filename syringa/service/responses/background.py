"""Responses that run without a client: their events are kept, so that anybody may follow them, from any place on.

A run belongs to the process that began it. Its events go to memory at once and to the store in batches, at most half a
second late. A follower reads from memory where the run is in this process, and asks the store again and again where
it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from syringa.errors import EngineOverloaded, StoreError, StoreUnavailable
from syringa.service.responses.record import Record, Response, read
from syringa.store import ACTIVE, Event, Store

logger = logging.getLogger("syringa.service")

FLUSH_SECONDS = 0.5
POLL_SECONDS = 0.5
RECENT = 2_000  # events that stay in memory after they were stored, for those who follow closely
MAX_UNSTORED = 50_000  # a run whose events cannot be stored ends here, before it fills the memory
_PAGE = 1000
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class Run:
    """One response that runs, and its events."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.cancelled = False
        self.response: Response | None = None  # how it ended
        self.ended = False
        self._finishing = False
        self._events: list[Event] = []
        self._first = 0  # the number of the first event in memory; they are numbered without gaps
        self._stored = 0  # the number of the first that is not in the store
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def publish(self, events: Sequence[Event]) -> None:
        if self._first + len(self._events) - self._stored > MAX_UNSTORED:
            raise StoreUnavailable("the events of a background response could not be stored")
        self._add(events)

    async def finish(self, response: Response, events: Sequence[Event] = ()) -> None:
        """The end, in the store before anybody hears of it. Once this has begun, nothing cancels it."""
        self._finishing = True
        await asyncio.shield(self.record.state.later(self._finish(response, events)))

    async def _finish(self, response: Response, events: Sequence[Event]) -> None:
        try:
            await self.record.finish(response, [*self._unstored(), *events])
            self.response = response
        finally:
            self.ended = True
            self._add(events)

    def give_up(self) -> None:
        """Whatever became of it: those who follow must not wait for ever."""
        if not self._finishing:
            self.ended = True
            self._add(())

    async def cancel(self) -> None:
        """Ends it, and waits until it has."""
        self.ask_to_cancel()
        if self.task is not None:
            await asyncio.wait([self.task])

    def ask_to_cancel(self) -> None:
        """Its work finds out by being cancelled, and tells this from a server that ends by `cancelled`."""
        if self.task is not None and not self.cancelled and not self._finishing:
            self.cancelled = True
            self.task.cancel()

    async def store_events(self) -> None:
        """Until it is cancelled. A batch that cannot be written waits for the next."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            with contextlib.suppress(StoreError):
                if events := self._unstored():
                    await self.record.state.store.append_events(self.record.organisation, self.record.id, events)
                    self._stored += len(events)
                    self._forget()

    async def follow(self, after: int) -> AsyncIterator[Sequence[Event]]:
        """The events with higher numbers than `after`, as they come, until the end."""
        while True:
            news, ended = self._news, self.ended
            if after + 1 < self._first:
                store = self.record.state.store
                events = await store.events_after(self.record.organisation, self.record.id, after, limit=_PAGE)
            else:
                events = self._events[after + 1 - self._first :]
            if events:
                after = events[-1].sequence
                yield events
            elif ended:
                return
            else:
                await news.wait()

    def _add(self, events: Sequence[Event]) -> None:
        self._events += events
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _unstored(self) -> list[Event]:
        return self._events[self._stored - self._first :]

    def _forget(self) -> None:
        old = self._stored - self._first - RECENT
        if old > 0:
            del self._events[:old]
            self._first += old


class Background:
    """The runs of this process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._beginning = 0
        self._runs: dict[tuple[str, str], Run] = {}

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Holds a place for a run that is about to start."""
        if len(self._runs) + self._beginning >= self._limit:
            raise EngineOverloaded(
                f"{self._limit} background responses are running, as many as this server allows; try again later.",
                code="too_many_background_responses",
            )
        self._beginning += 1
        try:
            yield
        finally:
            self._beginning -= 1

    def find(self, organisation: str, id: str) -> Run | None:
        return self._runs.get((organisation, id))

    def start(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        """`work` runs until it has called `run.finish`. It is cancelled when another process ends the response."""
        key = (run.record.organisation, run.record.id)
        run.task = asyncio.create_task(self._tend(run, work))
        run.record.on_loss(run.ask_to_cancel)
        self._runs[key] = run
        run.task.add_done_callback(lambda _: self._runs.pop(key, None))

    async def _tend(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        storing = asyncio.create_task(run.store_events())
        try:
            await work
        except Exception:
            logger.exception("background response %s failed", run.record.id)
        finally:
            storing.cancel()
            run.give_up()

    async def drain(self, seconds: float) -> None:
        """Gives what runs some time, then ends it."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def follow_stored(store: Store, organisation: str, id: str, after: int) -> AsyncIterator[Sequence[Event]]:
    """The same as `Run.follow`, of a response that another process runs, or that has ended."""
    ended = False
    while True:
        events = await store.events_after(organisation, id, after, limit=_PAGE)
        if events:
            after = events[-1].sequence
            yield events
            continue
        if ended:
            break
        found = await store.get_response(organisation, id)
        ended = found is None or found.status not in ACTIVE
        if not ended:
            await asyncio.sleep(POLL_SECONDS)
    if lost := await _untold_end(store, organisation, id, after):
        yield [lost]


async def _untold_end(store: Store, organisation: str, id: str, after: int) -> Event | None:
    """The last event of a response whose process died before it could write one."""
    found = await read(store, organisation, id)
    if found is None:  # deleted
        return None
    response = found[1]
    type_ = _ENDS.get(response["status"])
    last = await store.last_event(organisation, id)
    if type_ is None or (last is not None and msgspec.json.decode(last.json)["type"] in _ENDS.values()):
        return None
    # A follower may have seen more than its process could still store.
    number = max(after, last.sequence if last is not None else -1) + 1
    event = {"type": type_, "sequence_number": number, "response": response}
    return Event(number, msgspec.json.encode(event).decode())
