"""Batches, and the results of their lines until the output files are written.

A process that runs a batch holds the lease on it. Each of its writes renews the lease in the same transaction, so a
process that has lost it cannot write anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from sqlalchemy import and_, delete, func, or_, select, tuple_, update

from syringa.errors import NotFound
from syringa.store.queries import base
from syringa.store.queries.base import Queries
from syringa.store.queries.conversations import ConversationQueries
from syringa.store.queries.leases import LeaseQueries
from syringa.store.queries.responses import ResponseQueries
from syringa.store.queries.server import RevisionQueries
from syringa.store.queries.usage import UsageQueries
from syringa.store.records import (
    ACTIVE_BATCH,
    ActiveBatch,
    BatchCounts,
    BatchResult,
    BatchStatus,
    FinishedResponse,
    Order,
    StoredBatch,
)
from syringa.store.schema import batch_results, batches, leases

LEASE_PREFIX = "batch:"
DROPPED_CHUNK = 1000
_SUMS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


class BatchQueries(Queries):
    def create(self, batch: StoredBatch) -> None:
        self.connection.execute(batches.insert(), msgspec.structs.asdict(batch))
        RevisionQueries(self.connection, self.now).advance("batches")

    def get(self, organization: str, id: str) -> StoredBatch | None:
        query = select(batches).where(self.visible(batches, organization, id))
        found = self.connection.execute(query).mappings().first()
        return None if found is None else StoredBatch(**found)

    def page(
        self, organization: str, *, after: str | None = None, limit: int = 20, order: Order = "desc"
    ) -> tuple[list[StoredBatch], bool]:
        """Return a page of batches by age, and whether there are more. Raises `NotFound` for an unknown `after`."""
        key = tuple_(batches.c.created_at, batches.c.id)
        query = select(batches).where(batches.c.organization == organization, self.not_expired(batches))
        if after is not None:
            if (last := self.get(organization, after)) is None:
                raise NotFound(f"There is no batch {after!r} to continue after.", param="after", code="batch_not_found")
            position = tuple_(last.created_at, last.id)
            query = query.where(key > position if order == "asc" else key < position)
        columns = (batches.c.created_at, batches.c.id)
        query = query.order_by(*(each.asc() if order == "asc" else each.desc() for each in columns)).limit(limit + 1)
        found = [StoredBatch(**row) for row in self.connection.execute(query).mappings()]
        return found[:limit], len(found) > limit

    def active(self, limit: int = 1000) -> list[ActiveBatch]:
        """Return unfinished batches of all organizations, with the owners of their leases.

        Those that are being cancelled come first, then the oldest of each organization, then the second ones: an
        organization with many batches does not hide those of others.
        """
        age = (batches.c.created_at, batches.c.id)
        turn = func.row_number().over(partition_by=batches.c.organization, order_by=age)
        held = and_(leases.c.name == LEASE_PREFIX + batches.c.id, leases.c.expires_at > self.now)
        query = (
            select(batches, leases.c.owner.label("owner"))
            .join(leases, held, isouter=True)
            .where(batches.c.status.in_(ACTIVE_BATCH))
            .order_by((batches.c.status == "cancelling").desc(), turn, *age)
            .limit(limit)
        )
        rows = [dict(row) for row in self.connection.execute(query).mappings()]
        return [ActiveBatch(owner=row.pop("owner"), batch=StoredBatch(**row)) for row in rows]

    def change(
        self,
        organization: str,
        id: str,
        since: Collection[BatchStatus],
        status: BatchStatus,
        at: int,
        changes: Mapping[str, Any] = MappingProxyType({}),
    ) -> StoredBatch | None:
        """Give a batch with one of the statuses `since` another one, record when, and apply `changes`.

        Return it, or None if it has none of these statuses or is gone.
        """
        this = and_(batches.c.organization == organization, batches.c.id == id)
        found = self.connection.execute(select(batches.c.status, batches.c.times).where(this).with_for_update()).first()
        if found is None or found.status not in since:
            return None
        times = msgspec.json.encode(msgspec.json.decode(found.times) | {f"{status}_at": at}).decode()
        self.connection.execute(update(batches).where(this).values(**changes, status=status, times=times))
        return StoredBatch(**self.connection.execute(select(batches).where(this)).mappings().one())

    def cancel(self, organization: str, id: str) -> StoredBatch | None:
        """Cancel a batch that still runs lines; its owner is told. Return it, or None if it runs none any more."""
        changed = self.change(organization, id, ("validating", "in_progress"), "cancelling", int(self.now))
        if changed is not None:
            RevisionQueries(self.connection, self.now).advance("batches")
        return changed

    def take(self, id: str, owner: str, seconds: float, *, exited: str | None = None) -> bool:
        """Take or renew the lease on a batch. Return whether `owner` has it now. `exited`: an owner that has ended."""
        leases = LeaseQueries(self.connection, self.now)
        if exited is not None:
            leases.release(LEASE_PREFIX + id, exited)
        return leases.take(LEASE_PREFIX + id, owner, seconds)

    def release(self, id: str, owner: str) -> None:
        LeaseQueries(self.connection, self.now).release(LEASE_PREFIX + id, owner)

    def add_results(self, organization: str, id: str, results: Sequence[BatchResult]) -> None:
        """Store the results of lines together with their usage and responses. Lines that have a result keep it.

        A write with an unknown outcome can therefore be repeated: a line is neither stored nor billed twice.
        """
        done = self._done(organization, id, [result.line for result in results])
        new = list({result.line: result for result in results if result.line not in done}.values())
        if not new:
            return
        key = {"organization": organization, "batch_id": id}
        rows = [key | {"line": each.line, "failed": each.failed, "body": each.body} for each in new]
        self.connection.execute(batch_results.insert(), rows)
        records = [each.usage for each in new if each.usage is not None]
        UsageQueries(self.connection, self.now).add(records)
        for each in new:
            if each.response is not None:
                self._add_response(organization, each.response)
        failed = sum(each.failed for each in new)
        changes: dict[str, Any] = {
            "completed": batches.c.completed + len(new) - failed,
            "failed": batches.c.failed + failed,
        }
        changes |= {name: batches.c[name] + sum(getattr(each, name) for each in records) for name in _SUMS}
        self.connection.execute(
            update(batches).where(batches.c.organization == organization, batches.c.id == id).values(**changes)
        )

    def _add_response(self, organization: str, finished: FinishedResponse) -> None:
        if finished.response is not None:
            ResponseQueries(self.connection, self.now).create(finished.response, finished.items)
        elif finished.conversation_id is not None:
            ConversationQueries(self.connection, self.now).add_items(
                organization, finished.conversation_id, finished.items, duplicates="skip"
            )

    def done_lines(self, organization: str, id: str) -> set[int]:
        """Return the numbers of the lines that have a result."""
        query = select(batch_results.c.line).filter_by(organization=organization, batch_id=id)
        return set(self.connection.execute(query).scalars())

    def results(self, organization: str, id: str, *, after: int = 0, limit: int = 200) -> Sequence[Any]:
        """Return a page of results in the order of their lines, with `line`, `failed` and `body`."""
        columns = (batch_results.c.line, batch_results.c.failed, batch_results.c.body)
        query = select(*columns).filter_by(organization=organization, batch_id=id)
        return self.connection.execute(
            query.where(batch_results.c.line > after).order_by(batch_results.c.line).limit(limit)
        ).all()

    def drop_results(self) -> int:
        """Delete one chunk of the results of finished batches, and return their number."""
        finished = select(batches.c.organization, batches.c.id).where(
            batches.c.status.not_in(ACTIVE_BATCH),
            select(1)
            .where(batch_results.c.organization == batches.c.organization, batch_results.c.batch_id == batches.c.id)
            .exists(),
        )
        found = self.connection.execute(finished.limit(1)).first()
        if found is None:
            return 0
        this = and_(batch_results.c.organization == found.organization, batch_results.c.batch_id == found.id)
        lines = select(batch_results.c.line).where(this).order_by(batch_results.c.line).limit(DROPPED_CHUNK)
        return self.connection.execute(delete(batch_results).where(this, batch_results.c.line.in_(lines))).rowcount

    def waiting_lines(self, organization: str, *, lock: bool = False) -> int:
        """Return the number of lines of an organization's batches that have no result yet.

        `lock`: let transactions that add lines count one after the other, as they do in SQLite anyway.
        """
        if lock and self.connection.dialect.name == "postgresql":
            self.connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(f"batches {organization}"))))
        query = select(_waiting()).where(batches.c.organization == organization, batches.c.status.in_(ACTIVE_BATCH))
        return int(self.connection.execute(query).scalar() or 0)

    def counts(self) -> list[BatchCounts]:
        """Return the unfinished batches by status."""
        query = (
            select(batches.c.status, func.count(), _waiting())
            .where(batches.c.status.in_(ACTIVE_BATCH))
            .group_by(batches.c.status)
        )
        return [
            BatchCounts(status=status, batches=int(count), waiting_lines=int(lines))
            for status, count, lines in self.connection.execute(query)
        ]

    def _done(self, organization: str, id: str, lines: Sequence[int]) -> set[int]:
        found: set[int] = set()
        for some in base.batches(lines):
            query = select(batch_results.c.line).filter_by(organization=organization, batch_id=id)
            found.update(self.connection.execute(query.where(or_(batch_results.c.line.in_(some)))).scalars())
        return found


def _waiting() -> Any:
    return func.coalesce(func.sum(batches.c.total - batches.c.completed - batches.c.failed), 0)
