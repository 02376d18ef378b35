"""What requests cost, on its way to the store: noted at once in memory, written in batches by a task.

No request waits for it. A row stays in memory until the store has it, and has an id, so that one whose fate is unknown
can be written again. A server that is stopped writes everything; one that is killed loses what came after the last
beat.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence

import msgspec

from syringa.errors import StoreUnavailable
from syringa.store.records import UsageRow

logger = logging.getLogger("syringa.service")

BATCH = 1000  # rows in one transaction: others want to write too
CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.1  # between attempts at the end


class Meter:
    """Belongs to one event loop."""

    def __init__(
        self,
        add: Callable[[Sequence[UsageRow]], Awaitable[None]],
        *,
        settle: Callable[[], None] = lambda: None,
        flush_seconds: float = 0.9,
        most: int = 100_000,
    ) -> None:
        """`settle` notes what was expected. `most`: rows that wait while the store is away. With more, the oldest are
        lost."""
        self._add = add
        self._settle = settle
        self._expecting = False
        self._flush_seconds = flush_seconds
        self._most = most
        self._rows: OrderedDict[Hashable, UsageRow] = OrderedDict()
        self._batch = 0
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._lost = 0
        self._away = False
        self._closed = False

    def note(self, row: UsageRow) -> None:
        """Refusals that are alike become one row, or a client that runs against its limit would fill the database."""
        if self._closed:
            logger.error("a request ended after the meter, and is not counted")
            return
        name = self._name(row)
        held = self._rows.get(name)
        if held is not None:
            row = msgspec.structs.replace(held, requests=held.requests + row.requests)
        self._rows[name] = row
        if len(self._rows) > self._most:
            self._rows.popitem(last=False)
            self._lost += 1
            if self._lost == 1:
                logger.error("%d usage rows wait for the database: from now on the oldest are lost", self._most)
        self._go_on()

    def expect(self) -> None:
        """There is something to note, at the next beat: a request that has ended has others behind it."""
        if self._closed:
            self._settle()
        else:
            self._expecting = True
            self._go_on()

    def _go_on(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._write())

    async def flush(self) -> None:
        """Everything noted so far is in the store. Raises `StoreUnavailable`, and keeps the rows."""
        self._expecting = False
        self._settle()
        async with self._writing:
            left = len(self._rows)
            while left > 0 and self._rows:
                batch = list(itertools.islice(self._rows.items(), min(left, BATCH)))
                self._batch += 1  # nothing is merged into these any more
                await self._store([row for _, row in batch])
                for name, _ in batch:
                    self._rows.pop(name, None)
                left -= len(batch)
        if self._away:
            self._away = False
            logger.warning("usage is written again")
        self._say_lost()

    async def close(self) -> None:
        """Writes what is left, and tries again for a while if the store is away."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                self._settle()
                while self._rows or self._expecting:
                    try:
                        await self.flush()
                    except StoreUnavailable:
                        await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            pass
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lost += len(self._rows)
        self._rows.clear()
        self._say_lost()

    async def _write(self) -> None:
        """As long as there is something to write: a server that nobody asks anything sleeps."""
        try:
            while self._rows or self._expecting:
                await asyncio.sleep(self._flush_seconds)
                try:
                    await self.flush()
                except StoreUnavailable as error:
                    if not self._away:
                        self._away = True
                        logger.warning("usage is kept in memory until the database is back: %s", error.message)
        finally:
            self._task = None

    async def _store(self, rows: list[UsageRow]) -> None:
        """A row that the store will never take must not cost others theirs."""
        try:
            await self._add(rows)
        except StoreUnavailable:
            raise
        except Exception:
            if len(rows) == 1:
                self._lost += 1
                logger.exception("the usage of request %s cannot be stored", rows[0].request_id)
                return
            middle = len(rows) // 2
            await self._store(rows[:middle])
            await self._store(rows[middle:])

    def _name(self, row: UsageRow) -> Hashable:
        if row.outcome != "refused" or row.input_tokens or row.output_tokens or row.cost:
            return row.id
        return self._batch, row.organisation, row.key, row.model, row.endpoint, row.status

    def _say_lost(self) -> None:
        if self._lost:
            logger.error("%d usage rows are lost", self._lost)
            self._lost = 0
