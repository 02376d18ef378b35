"""Files of organizations: rows in the store, bytes on disk, quotas and expiry."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from syringa.errors import NotFound, PayloadTooLarge, RateLimited, StoreError, StoreOutcomeUnknown, StoreUnavailable
from syringa.ids import random_id
from syringa.service.files.storage import FileStorage, FileWriter
from syringa.store import FilePurpose, Store, StoredFile

logger = logging.getLogger("syringa.service")

MAINTENANCE_SECONDS = 3600.0
GARBAGE_SECONDS = 6 * 3600.0  # bytes of this age without a row are not those of an upload that goes on
_DAY = 86400
_PAGE = 500
_BUSY_SECONDS = 5.0  # after which an upload is tried again that others have left no room for


class FileManager:
    """One per process. The first upload, or `start`, begins the removal of expired files, batches and garbage."""

    def __init__(
        self, store: Store, storage: FileStorage, *, quota: int, days: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`quota`: bytes of an organization's files; `days`: how long a file is kept by default. 0: no limit."""
        self._store, self._storage, self._quota, self._days, self._clock = store, storage, quota, days, clock
        self._maintenance: asyncio.Task[None] | None = None
        self._receiving: Counter[str] = Counter()  # bytes of the uploads in progress, by organization

    @property
    def any_stored(self) -> bool:
        """Whether there ever was a file on this machine."""
        return self._storage.folder.exists()

    def start(self) -> None:
        """Remove expired files and garbage from now on."""
        if self._maintenance is None:
            self._maintenance = asyncio.create_task(self._maintain())

    async def close(self) -> None:
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def reserve(
        self, organization: str, size: int | None, largest: int = 0, *, overhead: int = 0
    ) -> AsyncIterator[None]:
        """Count bytes as used while they are received.

        A file of unknown size counts like the `largest` one, or takes what is left of the quota. Of a known `size`, up
        to `overhead` bytes are not part of the file. Raises `PayloadTooLarge` if the file exceeds the quota in any
        case, and `RateLimited` if it exceeds it together with others, which may still fail or turn out to be smaller.
        """
        if self._quota:
            used = await self._store.read(lambda session: session.files.total_bytes(organization))
            free, receiving = self._quota - used, self._receiving[organization]
            least = 1 if size is None else size - overhead
            if least > free:
                raise self._over_quota()
            if size is None:
                size = max(1, min(largest, free - receiving))
            if receiving and size > free - receiving:
                raise RateLimited(
                    "Other uploads of this organization may take what is left of its quota: try again when they have"
                    " ended.",
                    retry_after=_BUSY_SECONDS,
                    code="uploads_in_progress",
                )
        size = size or 0
        self._receiving[organization] += size
        try:
            yield
        finally:
            self._receiving[organization] -= size
            if not self._receiving[organization]:
                del self._receiving[organization]

    def new_writer(self) -> FileWriter:
        self.start()
        return self._storage.writer(random_id("file-"))

    async def add(
        self, writer: FileWriter, organization: str, filename: str, purpose: FilePurpose, *, seconds: int | None = None
    ) -> StoredFile:
        """Make a written file known, or remove it. `seconds`: how long it is kept; None: the default.

        Raises `PayloadTooLarge`. The bytes stay where it is unknown whether the row was written: when the database does
        not answer, or the wait for it is cancelled. Without a row, they are garbage, and are removed later.
        """
        file = self.describe(writer, organization, filename, purpose, seconds=seconds)
        try:
            await writer.finish()
        except BaseException:
            await writer.discard()
            raise
        quota = self._quota
        try:
            if not await self._store.write(lambda session: session.files.create(file, quota)):
                raise self._over_quota()
        except StoreOutcomeUnknown:
            raise
        except Exception:
            await writer.discard()
            raise
        return file

    def describe(
        self, writer: FileWriter, organization: str, filename: str, purpose: FilePurpose, *, seconds: int | None
    ) -> StoredFile:
        """Return the row of a file."""
        created_at = int(self._clock())
        kept = seconds if seconds is not None else self._days * _DAY or None
        return StoredFile(
            id=writer.id,
            organization=organization,
            created_at=created_at,
            expires_at=None if kept is None else created_at + kept,
            filename=filename,
            purpose=purpose,
            bytes=writer.bytes,
        )

    async def open(self, id: str) -> BinaryIO:
        """Open the bytes of a file. Raises `NotFound`, or `StoreUnavailable` if they cannot be read now."""
        try:
            return await asyncio.to_thread(self._storage.open, id)
        except FileNotFoundError:
            logger.error("files: a file has no bytes on this machine: file=%s folder=%s", id, self._storage.folder)
            raise NotFound(
                f"The content of the file {id!r} is not on this server.", code="file_content_not_found"
            ) from None
        except OSError as error:
            logger.error("files: a file cannot be read: file=%s error=%s", id, error)
            raise StoreUnavailable("The file cannot be read.") from None

    async def has_content(self, id: str) -> bool:
        """Return whether the bytes of a file are on this machine."""
        return await asyncio.to_thread(self._storage.exists, id)

    async def remove(self, id: str) -> None:
        """Remove the bytes of a file whose row is deleted. What fails is removed later, as garbage."""
        try:
            await asyncio.to_thread(self._storage.remove, id)
        except OSError as error:
            logger.warning("files: a file cannot be removed: file=%s error=%s", id, error)

    async def expire(self) -> int:
        """Delete the files that have expired, and return their number."""
        total = 0
        while expired := await self._store.write(lambda session: session.files.expire()):
            for file in expired:
                await self.remove(file.id)
            total += len(expired)
        return total

    async def collect_garbage(self, older_than: float = GARBAGE_SECONDS) -> int:
        """Remove the bytes that have no row, and return the number of files."""
        found = await asyncio.to_thread(lambda: list(self._storage.old_ids(older_than)))
        removed = 0
        for start in range(0, len(found), _PAGE):
            ids = found[start : start + _PAGE]
            known = await self._store.read(lambda session, ids=ids: session.files.known(ids))  # type: ignore[misc]
            for id in itertools.filterfalse(known.__contains__, ids):
                await self.remove(id)
                removed += 1
        if removed:
            logger.info("files: removed files without a row: count=%d", removed)
        return removed

    def _over_quota(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"The files of this organization may have {self._quota} bytes together: delete some first.",
            code="storage_quota_exceeded",
        )

    async def _maintain(self) -> None:
        while True:
            try:
                await self.expire()
                await self.collect_garbage()
                await self._store.expire()  # finished batches
                while await self._store.write(lambda session: session.batches.drop_results()):
                    pass
            except StoreError as error:
                logger.debug("files: maintenance failed: %s", error.message)
            except Exception:
                logger.exception("files: maintenance failed")
            await asyncio.sleep(MAINTENANCE_SECONDS)
