"""Files: what is known of each. Their bytes are on disk, and are there before the row."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from sqlalchemy import delete, func, or_, select, tuple_

from syringa.errors import NotFound
from syringa.store.queries.base import Queries, batches
from syringa.store.records import ACTIVE_BATCH, FilePurpose, Order, StoredFile
from syringa.store.schema import batches as batch_table
from syringa.store.schema import files

CHUNK = 100


class FileQueries(Queries):
    def create(self, file: StoredFile, quota: int = 0) -> bool:
        """Insert a file. Return False if the organization's files would have more than `quota` bytes; 0: no limit."""
        if quota:
            self._lock(file.organization)
            if self.total_bytes(file.organization) + file.bytes > quota:
                return False
        self.connection.execute(files.insert(), msgspec.structs.asdict(file))
        return True

    def total_bytes(self, organization: str) -> int:
        query = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.organization == organization)
        return int(self.connection.execute(query.where(self.not_expired(files))).scalar() or 0)

    def get(self, organization: str, id: str, *, lock: bool = False) -> StoredFile | None:
        """Return a file. `lock`: let no other transaction delete it, or begin to use it, before this one has ended."""
        query = select(files).where(self.visible(files, organization, id))
        found = self.connection.execute(query.with_for_update() if lock else query).mappings().first()
        return None if found is None else StoredFile(**found)

    def page(
        self,
        organization: str,
        *,
        purpose: FilePurpose | None = None,
        after: str | None = None,
        limit: int = 100,
        order: Order = "desc",
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of files by age, and whether there are more. Raises `NotFound` for an unknown `after`."""
        key = tuple_(files.c.created_at, files.c.id)
        query = select(files).where(files.c.organization == organization, self.not_expired(files))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if after is not None:
            if (last := self.get(organization, after)) is None:
                raise NotFound(f"There is no file {after!r} to continue after.", param="after", code="file_not_found")
            position = tuple_(last.created_at, last.id)
            query = query.where(key > position if order == "asc" else key < position)
        columns = (files.c.created_at, files.c.id)
        query = query.order_by(*(each.asc() if order == "asc" else each.desc() for each in columns)).limit(limit + 1)
        found = [StoredFile(**row) for row in self.connection.execute(query).mappings()]
        return found[:limit], len(found) > limit

    def is_used(self, organization: str, id: str) -> bool:
        """Return whether a file is the input of a batch that is not finished."""
        query = select(1).where(
            batch_table.c.organization == organization,
            batch_table.c.input_file == id,
            batch_table.c.status.in_(ACTIVE_BATCH),
        )
        return self.connection.execute(query.limit(1)).first() is not None

    def delete(self, organization: str, id: str) -> bool:
        """Delete a row. Return whether there was one. The caller removes the bytes afterwards."""
        return self.connection.execute(delete(files).where(self.visible(files, organization, id))).rowcount > 0

    def expire(self) -> list[StoredFile]:
        """Delete one chunk of the expired files that no unfinished batch needs, and return them."""
        used = select(batch_table.c.input_file).where(
            batch_table.c.organization == files.c.organization,
            batch_table.c.input_file == files.c.id,
            batch_table.c.status.in_(ACTIVE_BATCH),
        )
        query = select(files).where(files.c.expires_at <= self.now, ~used.exists()).limit(CHUNK)
        found = self.connection.execute(query.with_for_update(skip_locked=True, of=files)).mappings()
        expired = [StoredFile(**row) for row in found]
        if expired:
            self.connection.execute(delete(files).where(or_(*(files.c.id == each.id for each in expired))))
        return expired

    def known(self, ids: Iterable[str]) -> set[str]:
        """Return those of the ids that have a row, of whichever organization, expired or not."""
        found: set[str] = set()
        for batch in batches(ids):
            found.update(self.connection.execute(select(files.c.id).where(files.c.id.in_(batch))).scalars())
        return found

    def _lock(self, organization: str) -> None:
        """Let concurrent uploads of an organization be counted one after the other, as they are in SQLite anyway."""
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(organization))))
