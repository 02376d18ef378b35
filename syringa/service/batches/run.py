"""The run of one batch, from the validation of its input file to its output files.

A run may begin in any unfinished status, after a process that was killed at any moment. Results are in the store
together with their usage, or not at all: the lines without a result are run, the others are not run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from syringa.errors import NotFound, StoreError, StoreUnavailable
from syringa.service.auth.keys import Caller
from syringa.service.batches.lines import (
    BatchLine,
    LineProblem,
    custom_id_of,
    error_line,
    line_id,
    parse_line,
    read_lines,
    response_line,
)
from syringa.service.batches.output_files import write_output_files
from syringa.service.batches.results import LeaseLost, ResultWriter
from syringa.service.batches.validation import QUEUE_FULL, CustomIds, encode_problems, validate
from syringa.service.files.manager import FileManager
from syringa.service.limits.memory_budget import MemoryBudget
from syringa.service.usage.accounting import RequestAccounting
from syringa.store import BatchResult, BatchStatus, FinishedResponse, Store, StoredBatch, UsageRecord

if TYPE_CHECKING:
    from syringa.store.session import Session

logger = logging.getLogger("syringa.service")

T = TypeVar("T")

LEASE_SECONDS = 15.0
MAX_ATTEMPTS = 8  # of a line that may itself be the reason why it fails
# After so many lines in a row that found no model or no capacity, lines are run one at a time, with pauses between.
MAX_REFUSALS = 8
MAX_RETRY_SECONDS = 60.0  # the longest pause
LINE_BYTES = 64 << 20  # bodies of the lines that a process runs at a time
_DAY = 86400

_VALIDATING: tuple[BatchStatus, ...] = ("validating",)
_IN_PROGRESS: tuple[BatchStatus, ...] = ("in_progress",)
_UNCANCELLED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing")
_INTERNAL_ERROR = LineProblem("server_error", "An internal error occurred.")

EndReason = Literal["cancelled", "expired", "stopped"]


class _QueueFull(Exception):
    """The organization has too many lines in unfinished batches."""


def _nothing(session: Session) -> None: ...


class LineRequest(NamedTuple):
    """A line to run."""

    caller: Caller
    endpoint: str
    request_id: str
    body: bytes


class LineResponse(NamedTuple):
    """The response to a line, and its accounting, which is closed."""

    status: int
    body: bytes  # JSON
    accounting: RequestAccounting
    retry_after: float | None = None  # seconds; None: running it again would not help
    suspect: bool = False  # whether the request may be the reason why it has failed
    ignored: str = ""  # names of the fields of the body that were not acted on
    stored: FinishedResponse | None = None  # what is stored together with the result


ExecuteLine = Callable[[LineRequest], Awaitable[LineResponse]]


@dataclass(frozen=True, kw_only=True)
class BatchServices:
    """What the runs of a process share."""

    store: Store
    files: FileManager
    execute: ExecuteLine
    find_caller: Callable[[str], Caller | None]  # by the id of a key; None: it is no longer valid
    usage_of: Callable[[RequestAccounting, str], UsageRecord]  # of a line, with that id of the record
    slots: MemoryBudget  # a slot for each line that runs
    memory: MemoryBudget  # bytes of the bodies of these lines
    owner: str  # of leases: this process
    max_line: int  # bytes
    max_lines: int
    queue_lines: int  # of the unfinished batches of an organization; 0: no limit
    days: int  # for which a finished batch is kept; 0: forever
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class BatchRun:
    """One batch of which this process has the lease."""

    def __init__(self, batch: StoredBatch, services: BatchServices) -> None:
        self.batch = batch
        self._services, self._store = services, services.store
        self._ended = asyncio.Event()
        self._reason: EndReason | None = None
        self._problem: LineProblem | None = None
        self._stopping = False  # this process ends
        self._writer: ResultWriter | None = None
        self._left: set[int] = set()  # lines that found no model or no capacity, to be run again
        self._refusals = self._pauses = 0  # since a line had a result
        self._retry_after = 0.0
        self._attempts: Counter[int] = Counter()  # by line, of those that are limited

    def end(self, reason: EndReason, problem: LineProblem | None = None) -> None:
        """Run no more lines. `stopped`: this process ends, and another one goes on. The first reason counts."""
        if reason == "stopped":
            self._stopping = True
            if self._writer is not None:
                self._writer.hurry()
        if self._reason is None:
            self._reason, self._problem = reason, problem
            self._ended.set()

    async def run(self) -> None:
        """Run the batch to its end, or until it is stopped or the lease is lost. Does not raise."""
        try:
            await self._run()
        except LeaseLost:
            logger.warning("batches: another process has taken over: batch=%s", self.batch.id)
        except StoreError as error:
            logger.warning("batches: interrupted: batch=%s error=%s", self.batch.id, error.message)
        except Exception:
            logger.exception("batches: failed: batch=%s", self.batch.id)
            with contextlib.suppress(StoreError, LeaseLost):
                await self._fail([_INTERNAL_ERROR])

    async def _run(self) -> None:
        if self.batch.status == "validating":
            await self._validate()
        if self.batch.status == "in_progress":
            await self._process()
            if self._stopping:
                return
            await self._begin_finalizing()
        if self.batch.status in ("finalizing", "cancelling"):
            await self._finalize()

    # Validation

    async def _validate(self) -> None:
        services, batch = self._services, self.batch
        free: int | None = None
        if services.queue_lines:
            waiting = await self._store.read(lambda session: session.batches.waiting_lines(batch.organization))
            free = max(0, services.queue_lines - waiting)
        try:
            with await services.files.open(batch.input_file) as file:
                found = await validate(
                    batch, file, max_line=services.max_line, max_lines=services.max_lines, free_lines=free
                )
        except NotFound as error:
            await self._fail([LineProblem("file_not_found", error.message, "input_file_id")])
            return
        except StoreUnavailable as error:
            if services.clock() < batch.deadline:
                raise
            await self._fail([LineProblem("file_unreadable", error.message, "input_file_id")])
            return
        if found.problems:
            await self._fail(found.problems)
            return

        def check_queue(session: Session) -> None:
            """Count again, with the lines of this batch: others may have been validated at the same time."""
            if session.batches.waiting_lines(batch.organization, lock=True) > services.queue_lines:
                raise _QueueFull

        also = check_queue if services.queue_lines else _nothing
        try:
            await self._change(_VALIDATING, "in_progress", {"total": found.total, "model": found.model}, also)
        except _QueueFull:
            await self._fail([QUEUE_FULL])
            return
        logger.info("batches: started: batch=%s lines=%d endpoint=%s", batch.id, found.total, batch.endpoint)

    async def _fail(self, problems: list[LineProblem]) -> None:
        await self._change(_UNCANCELLED, "failed", {"errors": encode_problems(problems), **self._kept()})
        logger.warning("batches: failed: batch=%s code=%s", self.batch.id, problems[0].code)

    # Lines

    async def _process(self) -> None:
        """Run the lines that have no result, until all have one or the run is ended."""
        batch = self.batch
        done = await self._store.read(lambda session: session.batches.done_lines(batch.organization, batch.id))
        left = batch.deadline - self._services.clock()
        if left <= 0 and len(done) < batch.total:
            self.end("expired")
            return
        writer = self._writer = ResultWriter(self._store_results)
        if self._stopping:
            writer.hurry()
        feeding = asyncio.create_task(self._feed(done, writer))
        ended = asyncio.create_task(self._ended.wait())
        timer = asyncio.get_running_loop().call_later(max(0.0, left), self.end, "expired")
        try:
            await asyncio.wait({feeding, ended, writer.task}, return_when=asyncio.FIRST_COMPLETED)
            feeding.cancel()
            try:
                await feeding
            except asyncio.CancelledError:
                pass
            except StoreUnavailable:  # the input file cannot be read now
                await writer.close()
                raise
            await writer.close()
        except NotFound as error:
            await writer.close()
            self.end("cancelled", LineProblem("file_not_found", error.message, "input_file_id"))
        except (LeaseLost, StoreError):
            raise
        except Exception:  # lines that are answered and billed keep their results
            logger.exception("batches: line failed: batch=%s", batch.id)
            await writer.close()
            self.end("cancelled", _INTERNAL_ERROR)
        finally:
            timer.cancel()
            for task in (feeding, ended):
                task.cancel()
            await asyncio.gather(feeding, ended, return_exceptions=True)
            await writer.abandon()

    async def _feed(self, done: Collection[int], writer: ResultWriter) -> None:
        """Run the lines that are not done, and again those that find their models unavailable or overloaded."""
        await self._feed_lines(lambda number: number not in done, CustomIds(), writer)
        while self._left:
            await self._pause()
            left, self._left = self._left, set()
            await self._feed_lines(left.__contains__, None, writer)

    async def _feed_lines(self, is_wanted: Callable[[int], bool], ids: CustomIds | None, writer: ResultWriter) -> None:
        """Run some lines of the file. `ids`: to find duplicates; None if they have their results."""
        services, batch = self._services, self.batch
        tasks = set[asyncio.Task[None]]()
        try:
            with await services.files.open(batch.input_file) as file:
                async for line in read_lines(file, services.max_line):
                    if ids is None and not is_wanted(line.number):
                        continue
                    parsed = parse_line(line, batch.endpoint, services.max_line)
                    if ids is not None and isinstance(parsed, BatchLine) and not ids.is_new(parsed.custom_id):
                        parsed = _duplicate(parsed.custom_id, line.number)
                    if not is_wanted(line.number):
                        continue
                    if isinstance(parsed, LineProblem):
                        id = line_id(batch.id, line.number)
                        body = error_line(id, custom_id_of(line), parsed.code, parsed.message)
                        await writer.add(BatchResult(line=line.number, failed=True, body=body))
                        continue
                    if paused := self._refusals >= MAX_REFUSALS:
                        await self._pause()
                    slot = await self._reserve(len(parsed.body))
                    task = asyncio.create_task(self._run_line(line.number, parsed, writer, slot))
                    tasks.add(task)
                    task.add_done_callback(lambda each: None if _has_failed(each) else tasks.discard(each))
                    if paused:
                        await asyncio.wait({task})
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reserve(self, size: int) -> contextlib.AsyncExitStack:
        """Wait until a line with a body of so many bytes may run. The caller closes what is returned."""
        services, organization = self._services, self.batch.organization
        async with contextlib.AsyncExitStack() as reserved:
            await reserved.enter_async_context(services.slots.reserve(organization, 1))
            await reserved.enter_async_context(services.memory.reserve(organization, size))
            return reserved.pop_all()

    async def _run_line(
        self, number: int, line: BatchLine, writer: ResultWriter, slot: contextlib.AsyncExitStack
    ) -> None:
        async with slot:
            id = line_id(self.batch.id, number)
            response = await self._execute(id, line.body)
            if response is None:
                return
            if response.retry_after is not None and self._may_retry(number, response):
                self._left.add(number)
                self._refusals += 1
                self._retry_after = response.retry_after
                return
            self._refusals = self._pauses = 0
            body = response_line(id, line.custom_id, response.status, id, response.body, response.ignored)
            usage = self._services.usage_of(response.accounting, id)
            failed = response.status >= 400
            await writer.add(BatchResult(line=number, failed=failed, body=body, usage=usage, response=response.stored))

    async def _execute(self, id: str, body: bytes) -> LineResponse | None:
        """Run a line. None: the batch may not go on."""
        services = self._services
        while True:
            try:
                caller = services.find_caller(self.batch.key)
            except StoreUnavailable:  # the keys are not known
                await services.sleep(1.0)
                continue
            if caller is None:
                self.revoke()
                return None
            response = await services.execute(LineRequest(caller, self.batch.endpoint, id, body))
            if response.status == 401:  # the key was revoked meanwhile
                self.revoke()
                return None
            return response

    def _may_retry(self, number: int, response: LineResponse) -> bool:
        """Return whether a line that has failed waits for its model, until the completion window ends."""
        if not response.suspect:
            return True
        self._attempts[number] += 1
        return self._attempts[number] < MAX_ATTEMPTS

    async def _pause(self) -> None:
        """Wait for models to become available, longer each time until a line has a result."""
        seconds = min(MAX_RETRY_SECONDS, self._retry_after * 2 ** min(self._pauses, 16))
        if not self._pauses and self._refusals >= MAX_REFUSALS:
            logger.warning("batches: waits for a model: batch=%s lines=%d", self.batch.id, len(self._left))
        self._pauses += 1
        await self._services.sleep(seconds)

    def revoke(self) -> None:
        """End the batch because its API key is no longer valid."""
        message = "The API key that created the batch was revoked or has expired."
        self.end("cancelled", LineProblem("invalid_api_key", message))

    async def _store_results(self, results: list[BatchResult]) -> None:
        batch = self.batch
        await self._write(lambda session: session.batches.add_results(batch.organization, batch.id, results))

    # The end

    async def _begin_finalizing(self) -> None:
        if self._reason == "cancelled":
            errors = encode_problems([self._problem]) if self._problem is not None else None
            await self._change(_IN_PROGRESS, "cancelling", {"errors": errors})
        else:
            await self._change(_IN_PROGRESS, "finalizing")

    async def _finalize(self) -> None:
        """Write the output files, and finish the batch in the transaction that makes them known."""
        batch = await self._read()
        cancelled = batch.status == "cancelling"
        complete = batch.completed + batch.failed >= batch.total
        status: BatchStatus = "cancelled" if cancelled else "completed" if complete else "expired"
        async with write_output_files(batch, self._services, status) as written:
            changes: dict[str, Any] = {"failed": batch.failed + written.missing, **self._kept()}
            changes |= {name: file.id for name, file in written.files.items()}

            def create_files(session: Session) -> None:
                for file in written.files.values():
                    session.files.create(file)

            await self._change((batch.status,), status, changes, create_files)
        done = self.batch
        logger.info("batches: %s: batch=%s completed=%d failed=%d", done.status, done.id, done.completed, done.failed)
        while await self._store.write(lambda session: session.batches.drop_results()):
            pass

    # The store

    async def _read(self) -> StoredBatch:
        batch = self.batch
        found = await self._store.read(lambda session: session.batches.get(batch.organization, batch.id))
        if found is None:
            raise LeaseLost
        return found

    async def _change(
        self,
        since: Collection[BatchStatus],
        status: BatchStatus,
        changes: dict[str, Any] | None = None,
        also: Callable[[Session], None] = _nothing,
    ) -> None:
        """Change the status. If a client has cancelled the batch meanwhile, that one counts."""
        batch, at = self.batch, int(self._services.clock())

        def change(session: Session) -> StoredBatch | None:
            changed = session.batches.change(batch.organization, batch.id, since, status, at, changes or {})
            if changed is not None:
                also(session)
            return changed

        changed = await self._write(change)
        self.batch = changed if changed is not None else await self._read()

    async def _write(self, query: Callable[[Session], T]) -> T:
        """Write, in a transaction that fails if another process has the lease."""
        id, owner = self.batch.id, self._services.owner

        def transaction(session: Session) -> T:
            if not session.batches.take(id, owner, LEASE_SECONDS):
                raise LeaseLost
            return query(session)

        return await self._store.write(transaction)

    def _kept(self) -> dict[str, int | None]:
        days = self._services.days
        return {"expires_at": int(self._services.clock()) + days * _DAY if days else None}


def _has_failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None


def _duplicate(custom_id: str, number: int) -> LineProblem:
    message = (
        f"The custom_id {custom_id!r} for this request is a duplicate of another request. The custom_id parameter must"
        " be unique for each request in a batch."
    )
    return LineProblem("duplicate_custom_id", message, "custom_id", number)
