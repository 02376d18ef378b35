"""The parts of a `Store` that are the server's own: `store.keys`, `store.organisations`, `store.usage`, `store.models`.

Like every method of a `Store`, these may raise `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from syringa.store.records import (
    ApiKey,
    Grouping,
    KeySnapshot,
    ModelRow,
    ModelUsage,
    Organisation,
    UsageFilter,
    UsageRow,
    UsageSum,
)

if TYPE_CHECKING:
    from syringa.store.store import Store

_ALL = UsageFilter()


class Part:
    def __init__(self, store: Store) -> None:
        self._store = store


class KeyPart(Part):
    async def create(self, key: ApiKey) -> bool:
        """Keeps a key, and makes its organisation if that is new. False: the id or the key is there already."""
        return await self._store.write(lambda session: session.keys.create(key))

    async def get(self, id: str) -> ApiKey | None:
        return await self._store.read(lambda session: session.keys.get(id))

    async def all(self, organisation: str | None = None) -> list[ApiKey]:
        """Also those that are revoked or have expired. None: of every organisation."""
        return await self._store.read(lambda session: session.keys.all(organisation))

    async def revoke(self, id: str) -> ApiKey | None:
        """The key as it is now: `revoked_at` is when it was revoked first. None: there is no such key."""
        return await self._store.write(lambda session: session.keys.revoke(id))

    async def touch(self, used: Mapping[str, float]) -> None:
        """Notes when keys were used. An earlier time than the one that is known changes nothing."""
        await self._store.write(lambda session: session.keys.touch(used))

    async def snapshot(self) -> KeySnapshot:
        return await self._store.watch(lambda session: session.keys.snapshot())

    async def usable(self) -> bool:
        """Whether there is a key that is neither revoked nor expired."""
        return await self._store.read(lambda session: session.keys.usable())


class OrganisationPart(Part):
    async def get(self, id: str) -> Organisation | None:
        return await self._store.read(lambda session: session.organisations.get(id))

    async def all(self) -> list[Organisation]:
        return await self._store.read(lambda session: session.organisations.all())

    async def set(
        self,
        id: str,
        *,
        requests_per_minute: int | UnsetType | None = UNSET,
        tokens_per_minute: int | UnsetType | None = UNSET,
        concurrent: int | UnsetType | None = UNSET,
    ) -> Organisation:
        """Changes limits, and makes the organisation if it is new. None: the server's default from now on."""
        given = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "concurrent": concurrent,
        }
        limits = {name: limit for name, limit in given.items() if not isinstance(limit, UnsetType)}
        return await self._store.write(lambda session: session.organisations.set(id, limits))


class UsagePart(Part):
    async def add(self, rows: Sequence[UsageRow]) -> None:
        """All or none. Rows that were written before are not written again: after a failure, hand in the same ones."""
        if rows:
            await self._store.write(lambda session: session.usage.add(rows))

    async def sums(self, by: Collection[Grouping] = (), which: UsageFilter = _ALL) -> list[UsageSum]:
        """Sums for each day (in UTC), key, model and so on, or for each combination of several of them."""
        return await self._store.read(lambda session: session.usage.sums(by, which))

    async def rows(self, which: UsageFilter = _ALL, *, after: str | None = None, limit: int = 100) -> list[UsageRow]:
        """Newest first. `after`: the id of the last row of the page before; one that is gone ends the walk."""
        return await self._store.read(lambda session: session.usage.rows(which, after, limit))

    async def by_model(self, since: float) -> list[ModelUsage]:
        """How each model did that was asked since then. Every such row is read: call it now and then, not always."""
        return await self._store.read(lambda session: session.usage.by_model(since))

    async def expire(self, before: float) -> int:
        """Removes rows that began before then, some thousand at a time, and says how many."""
        total = 0
        while count := await self._store.write(lambda session: session.usage.expire(before)):
            total += count
        return total


class ModelPart(Part):
    async def put(self, id: str, definition: str) -> ModelRow:
        """Keeps a model's definition, which is JSON, in place of the one before."""
        return await self._store.write(lambda session: session.models.put(id, definition))

    async def delete(self, id: str) -> bool:
        return await self._store.write(lambda session: session.models.delete(id))

    async def all(self) -> list[ModelRow]:
        return await self._store.read(lambda session: session.models.all())

    async def snapshot(self) -> tuple[int, list[ModelRow]]:
        """With the revision that these are of."""
        return await self._store.watch(lambda session: (session.revisions.get("models"), session.models.all()))
