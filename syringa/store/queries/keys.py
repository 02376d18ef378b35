"""API keys and the organisations that they belong to. Every change to either raises the revision of `keys`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import BigInteger, and_, bindparam, or_, select, update

from syringa.store.queries.base import Queries
from syringa.store.queries.revisions import Revisions
from syringa.store.records import ApiKey, KeySnapshot, Organisation
from syringa.store.schema import api_keys, organisations

# For so long, whoever sends a key that has expired is told so, and not that it is unknown.
REMEMBERED_SECONDS = 30 * 86400

_models = msgspec.json.Decoder(tuple[str, ...])


class Organisations(Queries):
    def get(self, id: str) -> Organisation | None:
        found = self.connection.execute(select(organisations).where(organisations.c.id == id)).mappings().first()
        return None if found is None else Organisation(**found)

    def all(self) -> list[Organisation]:
        query = select(organisations).order_by(organisations.c.id)
        return [Organisation(**row) for row in self.connection.execute(query).mappings()]

    def set(self, id: str, limits: Mapping[str, int | None]) -> Organisation:
        """Makes it if it is new. A limit that is not named stays as it is."""
        self.insert_new(organisations, _new_organisation(id, self.now))
        if limits:
            self.connection.execute(update(organisations).where(organisations.c.id == id).values(**limits))
        Revisions(self.connection, self.now).advance("keys")
        found = self.get(id)
        assert found is not None
        return found


class Keys(Queries):
    def create(self, key: ApiKey) -> bool:
        self.insert_new(organisations, _new_organisation(key.organisation, self.now))
        row = msgspec.structs.asdict(key)
        row["models"] = None if key.models is None else msgspec.json.encode(key.models).decode()
        if not self.insert_new(api_keys, row):
            return False
        Revisions(self.connection, self.now).advance("keys")
        return True

    def get(self, id: str) -> ApiKey | None:
        found = self.connection.execute(select(api_keys).where(api_keys.c.id == id)).mappings().first()
        return None if found is None else _key(found)

    def all(self, organisation: str | None) -> list[ApiKey]:
        query = select(api_keys).order_by(api_keys.c.organisation, api_keys.c.created_at, api_keys.c.id)
        if organisation is not None:
            query = query.where(api_keys.c.organisation == organisation)
        return [_key(row) for row in self.connection.execute(query).mappings()]

    def revoke(self, id: str) -> ApiKey | None:
        change = update(api_keys).where(api_keys.c.id == id, api_keys.c.revoked_at.is_(None))
        if self.connection.execute(change.values(revoked_at=int(self.now))).rowcount > 0:
            Revisions(self.connection, self.now).advance("keys")
        return self.get(id)

    def touch(self, used: Mapping[str, float]) -> None:
        """No revision: nobody keeps a copy of this. In the order of the ids, so that two do not wait for each other."""
        if not used:
            return
        last, at = api_keys.c.last_used_at, bindparam("used_at", type_=BigInteger)
        change = update(api_keys).where(api_keys.c.id == bindparam("used"), or_(last.is_(None), last < at))
        rows = [{"used": id, "used_at": int(used[id])} for id in sorted(used)]
        self.connection.execute(change.values(last_used_at=at), rows)

    def snapshot(self) -> KeySnapshot:
        kept = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > self.now - REMEMBERED_SECONDS)
        query = select(api_keys).where(and_(api_keys.c.revoked_at.is_(None), kept))
        return KeySnapshot(
            revision=Revisions(self.connection, self.now).get("keys"),
            keys=tuple(_key(row) for row in self.connection.execute(query).mappings()),
            organisations={each.id: each for each in Organisations(self.connection, self.now).all()},
            any_ever=self.connection.execute(select(1).select_from(api_keys).limit(1)).first() is not None,
        )

    def usable(self) -> bool:
        query = select(1).select_from(api_keys).where(api_keys.c.revoked_at.is_(None), self.lasting(api_keys)).limit(1)
        return self.connection.execute(query).first() is not None


def _new_organisation(id: str, now: float) -> dict[str, Any]:
    return {"id": id, "created_at": int(now)}


def _key(row: Any) -> ApiKey:
    models = row["models"]
    return ApiKey(**{**row, "models": None if models is None else _models.decode(models)})
