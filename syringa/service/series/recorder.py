"""Recording of figures: each process counts its requests in intervals of ten seconds, and stores those that are over.

One process of a server also samples the engines, merges stored intervals into longer ones as they get old, and deletes
those that are too old. Nothing is done per token, and nothing is stored while nothing happens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from syringa.errors import StoreError
from syringa.service.series.figures import Figures, decode_figures, encode_figures
from syringa.service.usage.accounting import RequestAccounting
from syringa.store import SeriesRow, Store
from syringa.types import EngineStats

logger = logging.getLogger("syringa.service")

INTERVAL = 10  # seconds
SAMPLE_SECONDS = 5.0
MAINTENANCE_SECONDS = 60.0
CLOSE_SECONDS = 2.0
MAX_PENDING = 5000  # intervals that are kept while the database is not available
KEEP_SECONDS = 30 * 86_400

# Intervals older than `age` seconds are merged into those of the next resolution.
RESOLUTIONS = ((INTERVAL, 2 * 3600), (60, 2 * 86_400), (900, KEEP_SECONDS))

ReadStats = Callable[[], Awaitable[Mapping[str, EngineStats]]]
"""Returns the statistics of the engines that are loaded and respond, by model."""


class SeriesRecorder:
    """Counts the requests of this process. Belongs to one event loop."""

    def __init__(
        self, store: Store, source: str, engine_source: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`source`: unique to this process. `engine_source`: under which the engines are sampled.

        Servers with the same engines have the same one, and their samples replace each other; None: they are sampled
        by another process of the server.
        """
        self._store, self._source, self._engine_source, self._clock = store, source, engine_source, clock
        self.read_stats: ReadStats | None = None  # set by the app, which has the engines
        self._open: dict[tuple[str, str], Figures] = {}  # of the current interval, by source and model
        self._start = self._interval()
        self._pending: list[SeriesRow] = []
        self._last: dict[str, EngineStats] = {}
        self._sampled_at = 0.0
        self._maintained_at = clock()
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run())]

    async def close(self) -> None:
        """Store what was counted so far. To be called before the store is closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_interval()
        if self._tasks:
            try:
                await asyncio.wait_for(self.flush(), CLOSE_SECONDS)
            except (StoreError, TimeoutError):
                logger.warning("series: the last figures could not be stored")

    def observe(self, accounting: RequestAccounting) -> None:
        """Count a request that has ended."""
        self._figures(self._source, accounting.model).observe(accounting)

    def count_refused(self, status: int) -> None:
        """Count a request that was rejected before its model was known."""
        figures = self._figures(self._source, "")
        figures.refused += 1
        figures.count_error(status)

    async def sample(self) -> None:
        """Add the state of the engines to the current interval."""
        if self.read_stats is None or self._engine_source is None:
            return
        found = await self.read_stats()
        now = self._clock()
        seconds = min(now - self._sampled_at, INTERVAL) if self._sampled_at else SAMPLE_SECONDS
        self._sampled_at = now
        for model, stats in found.items():
            # What an engine has counted before it is first seen was counted by another process, or long ago.
            before = self._last.get(model, stats)
            self._figures(self._engine_source, model).sample(stats, before, max(0.0, seconds))
        self._last |= found

    async def flush(self) -> None:
        """Store the intervals that are over. Raises `StoreError`, and keeps them."""
        if self._interval() != self._start:
            self._end_interval()
        async with self._writing:
            rows = self._pending[:]
            if not rows or self._store.location.is_empty():
                return
            await self._store.write(lambda session: session.series.put(rows))
            stored = {id(row) for row in rows}  # the oldest may have been dropped meanwhile
            self._pending[:] = [row for row in self._pending if id(row) not in stored]

    async def maintain(self) -> None:
        """Merge old intervals into longer ones, and delete those that are too old. Raises `StoreError`."""
        if self._store.location.is_empty():
            return
        now = self._clock()
        for (fine, age), (coarse, _) in itertools.pairwise(RESOLUTIONS):
            before = int(now - age) // coarse * coarse
            while await self._roll_chunk(fine, coarse, before):
                pass
        while await self._store.write(lambda session: session.series.expire(int(now - KEEP_SECONDS))):
            pass

    async def _roll_chunk(self, fine: int, coarse: int, before: int) -> int:
        return await self._store.write(lambda session: session.series.roll(fine, coarse, before, merge_rows))

    def _figures(self, source: str, model: str) -> Figures:
        if self._interval() != self._start:
            self._end_interval()
        figures = self._open.get((source, model))
        if figures is None:
            figures = self._open[source, model] = Figures()
        return figures

    def _interval(self) -> int:
        return int(self._clock()) // INTERVAL * INTERVAL

    def _end_interval(self) -> None:
        for (source, model), figures in self._open.items():
            if not figures.is_idle:
                row = SeriesRow(INTERVAL, self._start, model, source, encode_figures(figures))
                self._pending.append(row)
        del self._pending[:-MAX_PENDING]
        self._open, self._start = {}, self._interval()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            try:
                await self.sample()
                await self.flush()
                if self._engine_source is not None and self._clock() - self._maintained_at >= MAINTENANCE_SECONDS:
                    self._maintained_at = self._clock()
                    await self.maintain()
            except StoreError as error:
                logger.debug("series: the database is not available: %s", error.message)
            except Exception:
                logger.exception("series: recording failed")


def merge_rows(existing: str | None, rows: Sequence[SeriesRow]) -> str:
    """Return the figures of an interval, given those that it has so far and rows of shorter intervals in it."""
    merged = Figures() if existing is None else decode_figures(existing)
    for figures in combine_sources(rows).values():
        merged.add(figures, simultaneous=False)
    return encode_figures(merged)


def combine_sources(rows: Sequence[SeriesRow]) -> dict[tuple[int, int], Figures]:
    """Return the figures of all sources together, by the start and the length of intervals."""
    combined: dict[tuple[int, int], Figures] = {}
    for row in rows:
        figures = combined.get((row.start, row.resolution))
        if figures is None:
            combined[row.start, row.resolution] = decode_figures(row.figures)
        else:
            figures.add(decode_figures(row.figures), simultaneous=True)
    return combined
