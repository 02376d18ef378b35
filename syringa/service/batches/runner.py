"""The batches that this process runs, out of those that all processes with the same database may run.

A process that runs a batch holds a lease on it and renews it. When the process is killed, another one takes the batch
over: at once on the same machine, where the process table tells, and otherwise when the lease has expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from syringa.errors import StoreError, StoreUnavailable
from syringa.service.batches.run import LEASE_SECONDS, BatchRun, BatchServices
from syringa.service.responses import process_identity
from syringa.service.store_poller import StoreRevisions
from syringa.store import ACTIVE_BATCH, ActiveBatch, StoredBatch

logger = logging.getLogger("syringa.service")

MAX_RUNS = 16  # batches of a process at a time; the others wait, unless their organization has none among these
MAX_ORGANIZATIONS = 64  # the most batches of a process at a time, of so many organizations then
SCAN_SECONDS = 5.0  # between two looks at all unfinished batches, for those of processes that have ended
RENEW_SECONDS = 4.0
RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 60.0  # before a batch is taken again that the database or the disk interrupted


class BatchRunner:
    """Takes unfinished batches and runs them. `refresh` is called again and again by the poller of the store."""

    def __init__(
        self, services: Callable[[], BatchServices | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`services`: None while lines cannot be run."""
        self._make_services, self._clock = services, clock
        self._services: BatchServices | None = None
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}  # by the id of the batch
        self._revision: int | None = None
        self._scan_at = 0.0
        self._renew_at = 0.0
        self._unfinished = False  # whether there were unfinished batches at the last scan
        self._not_here: set[str] = set()  # batches whose input file is on another machine
        self._interrupted: dict[str, tuple[int, float]] = {}  # batches, with how often and when they may be taken again
        self._scanning = asyncio.Lock()
        self._closed = False

    async def refresh(self, revisions: StoreRevisions) -> None:
        """Take batches that are new or were left behind, and notice what was cancelled. Handles its own errors."""
        if self._closed or not self._ready():
            return
        assert self._services is not None
        try:
            if self._services.store.location.is_empty():
                return
            revision = await revisions.get("batches")
            now = self._clock()
            if revision != self._revision or (self._unfinished and now >= self._scan_at):
                await self.scan()
                self._revision = revision
            if self._runs and now >= self._renew_at:
                self._renew_at = now + RENEW_SECONDS
                await self._renew()
        except StoreError as error:
            logger.debug("batches: refresh failed: %s", error.message)
        except Exception:  # polling must go on
            logger.exception("batches: refresh failed")

    async def scan(self) -> None:
        """Look at all unfinished batches now. Raises `StoreError`."""
        if self._closed or not self._ready():
            return
        async with self._scanning:
            services = self._services
            assert services is not None
            self._scan_at = self._clock() + SCAN_SECONDS
            active = await services.store.poll(lambda session: session.batches.active())
            self._unfinished = bool(active)
            ids = {each.batch.id for each in active}
            self._not_here &= ids
            self._interrupted = {id: state for id, state in self._interrupted.items() if id in ids}
            for each in active:
                if each.batch.status == "cancelling" and (running := self._runs.get(each.batch.id)) is not None:
                    running[0].end("cancelled")
            for candidate in self._candidates(active):
                if self._has_room(candidate.batch.organization) and await self._is_runnable(candidate.batch):
                    await self._take(candidate)

    async def close(self) -> None:
        """Stop running lines, store the results of those that are done, and give the leases back."""
        self._closed = True
        async with self._scanning:  # it may just have taken a batch
            for run, _ in self._runs.values():
                run.end("stopped")
        await asyncio.gather(*(task for _, task in self._runs.values()), return_exceptions=True)

    def _ready(self) -> bool:
        if self._services is None:
            self._services = self._make_services()
        return self._services is not None

    def _candidates(self, active: Sequence[ActiveBatch]) -> list[ActiveBatch]:
        """Return the batches that have no living owner: by turns of their organizations, the oldest of each first."""
        running = Counter(run.batch.organization for run, _ in self._runs.values())
        turns: list[tuple[int, int, ActiveBatch]] = []
        now = self._clock()
        for position, each in enumerate(active):
            owner = each.owner
            if each.batch.id in self._runs or (owner is not None and not process_identity.has_exited(owner)):
                continue
            if each.batch.id in self._interrupted and now < self._interrupted[each.batch.id][1]:
                continue
            turns.append((running[each.batch.organization], position, each))
            running[each.batch.organization] += 1
        return [each for _, _, each in sorted(turns, key=lambda turn: turn[:2])]

    def _has_room(self, organization: str) -> bool:
        if self._closed or len(self._runs) < MAX_RUNS:
            return not self._closed
        alone = all(run.batch.organization != organization for run, _ in self._runs.values())
        return alone and len(self._runs) < MAX_ORGANIZATIONS

    async def _is_runnable(self, batch: StoredBatch) -> bool:
        """Return whether the input file is on this machine, or is not needed any more."""
        assert self._services is not None
        if batch.status == "cancelling" or self._services.clock() >= batch.deadline:
            return True
        if await self._services.files.has_content(batch.input_file):
            return True
        if batch.id not in self._not_here:
            self._not_here.add(batch.id)
            logger.warning(
                "batches: left to a server that has the input file: batch=%s file=%s", batch.id, batch.input_file
            )
        return False

    async def _take(self, candidate: ActiveBatch) -> None:
        services, batch = self._services, candidate.batch
        assert services is not None
        owner, exited = services.owner, candidate.owner
        taken = await services.store.write(
            lambda session: session.batches.take(batch.id, owner, LEASE_SECONDS, exited=exited)
        )
        if not taken:
            return
        current = await services.store.read(lambda session: session.batches.get(batch.organization, batch.id))
        if current is None:
            return
        run = BatchRun(current, services)
        self._runs[batch.id] = run, asyncio.create_task(self._run(run), name=f"batch {batch.id}")

    async def _run(self, run: BatchRun) -> None:
        services = self._services
        assert services is not None
        try:
            await run.run()
        finally:
            id = run.batch.id
            del self._runs[id]
            self._scan_at = 0.0  # others may be waiting for a place
            if run.batch.status in ACTIVE_BATCH:
                failures, _ = self._interrupted.get(id, (0, 0.0))
                delay = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** min(failures, 8))
                self._interrupted[id] = failures + 1, self._clock() + delay
            with contextlib.suppress(StoreError):
                await services.store.write(lambda session: session.batches.release(id, services.owner))

    async def _renew(self) -> None:
        """Renew all leases. A run whose lease is lost notices it with its next write; here it is stopped sooner."""
        services, ids = self._services, list(self._runs)
        assert services is not None
        for id in ids:
            with contextlib.suppress(StoreUnavailable):
                held = await services.store.write(
                    lambda session, id=id: session.batches.take(id, services.owner, LEASE_SECONDS)  # type: ignore[misc]
                )
                if not held and id in self._runs:
                    self._runs[id][0].end("stopped")
        for run, _ in list(self._runs.values()):
            with contextlib.suppress(StoreUnavailable):
                if services.find_caller(run.batch.key) is None:
                    run.revoke()
