"""Usage records on their way to the store: buffered in memory and in the journal, written in batches by a task.

No request waits for the database. A record stays in memory and in the journal until it is stored, and has an id, so
that a write with an unknown outcome can be repeated without counting twice. A process that is killed leaves its records
in the journal, from which they are stored later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence

import msgspec

from syringa.errors import StoreUnavailable
from syringa.service.usage.journal import UsageJournal
from syringa.store.records import UsageRecord

logger = logging.getLogger("syringa.service")

BATCH = 1000  # records in one transaction, so that other writers get their turn
CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.1  # between attempts while closing


class UsageWriter:
    """Buffers and writes usage records. Belongs to one event loop."""

    def __init__(
        self,
        store_records: Callable[[Sequence[UsageRecord]], Awaitable[None]],
        journal: UsageJournal | None = None,
        *,
        before_flush: Callable[[], None] = lambda: None,
        flush_seconds: float = 0.9,
        max_records: int = 100_000,
    ) -> None:
        """`journal`: None if killing the process may cost records. `before_flush` is called before each flush.
        `max_records`: with more, while the store is unavailable, the oldest are dropped."""
        self._store_records = store_records
        self._journal = journal
        self._before_flush = before_flush
        self._flush_seconds = flush_seconds
        self._max_records = max_records
        self._records: OrderedDict[Hashable, UsageRecord] = OrderedDict()
        self._batch = 0
        self._flushing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._dropped = 0
        self._unavailable = False
        self._closed = False

    def recover(self) -> None:
        """Add the records that ended processes have left in the journal. Some may be stored already."""
        if self._journal is not None:
            self._records |= {record.id: record for record in self._journal.recover()}
            if self._records:
                self._ensure_task()

    def add(self, record: UsageRecord) -> None:
        """Add a record, and write it to the journal before this returns.

        Equal refusals are merged, so that a client at its limit does not fill the database.
        """
        if self._closed:
            logger.error("usage: a request ended after the writer was closed and is not counted")
            return
        key = self._merge_key(record)
        merged = self._records.get(key)
        if merged is not None:
            record = msgspec.structs.replace(merged, requests=merged.requests + record.requests)
        self._records[key] = record
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)
            self._dropped += 1
            if self._dropped == 1:
                logger.error(
                    "usage: the buffer is full, dropping the oldest records: max_records=%d", self._max_records
                )
        if self._journal is not None:
            self._journal.append(record)
            if self._journal.lines > 2 * self._max_records:  # the store is unavailable, and requests are refused
                self._journal.rewrite(self._records.values())
        self._ensure_task()

    def _ensure_task(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def flush(self) -> None:
        """Write all records added so far. Raises `StoreUnavailable`, and keeps the records."""
        self._before_flush()
        async with self._flushing:
            left = len(self._records)
            while left > 0 and self._records:
                batch = list(itertools.islice(self._records.items(), min(left, BATCH)))
                self._batch += 1  # later records are not merged into these
                await self._write([record for _, record in batch])
                for key, _ in batch:
                    self._records.pop(key, None)
                left -= len(batch)
            if self._journal is not None:
                self._journal.rewrite(self._records.values())
        if self._unavailable:
            self._unavailable = False
            logger.warning("usage: records are written again")
        self._log_dropped()

    async def close(self) -> None:
        """Write what is left, retrying for `CLOSE_SECONDS` while the store is unavailable."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                self._before_flush()
                while self._records:
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
        if self._records and self._journal is not None and self._journal.usable:
            logger.warning("usage: records are stored at the next start: count=%d", len(self._records))
        else:
            self._dropped += len(self._records)
        self._records.clear()
        if self._journal is not None:
            self._journal.close()
        self._log_dropped()

    async def _run(self) -> None:
        """Flush until the buffer is empty; an idle server has no task."""
        try:
            while self._records:
                await asyncio.sleep(self._flush_seconds)
                try:
                    await self.flush()
                except StoreUnavailable as error:
                    if not self._unavailable:
                        self._unavailable = True
                        logger.warning("usage: records are buffered until the database is back: %s", error.message)
        finally:
            self._task = None

    async def _write(self, records: list[UsageRecord]) -> None:
        """Write records, bisecting on errors: a record that the store rejects must not cost others."""
        try:
            await self._store_records(records)
        except StoreUnavailable:
            raise
        except Exception:
            if len(records) == 1:
                self._dropped += 1
                logger.exception("usage: record cannot be stored: request_id=%s", records[0].request_id)
                return
            middle = len(records) // 2
            await self._write(records[:middle])
            await self._write(records[middle:])

    def _merge_key(self, record: UsageRecord) -> Hashable:
        if record.outcome != "refused" or record.input_tokens or record.output_tokens or record.cost:
            return record.id
        return self._batch, record.organization, record.key, record.model, record.endpoint, record.status

    def _log_dropped(self) -> None:
        if self._dropped:
            logger.error("usage: records are lost: count=%d", self._dropped)
            self._dropped = 0
