"""API keys and organizations. Every change to either advances the revision of `keys`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import BigInteger, and_, bindparam, or_, select, update

from syringa.store.queries.base import Queries
from syringa.store.queries.server import RevisionQueries
from syringa.store.records import ApiKey, KeySnapshot, Organization
from syringa.store.schema import api_keys, organizations

# How long an expired key is reported as expired; later it is unknown.
EXPIRED_KEY_SECONDS = 30 * 86400

_decode_models = msgspec.json.Decoder(tuple[str, ...]).decode


class OrganizationQueries(Queries):
    def get(self, id: str) -> Organization | None:
        found = self.connection.execute(select(organizations).where(organizations.c.id == id)).mappings().first()
        return None if found is None else Organization(**found)

    def all(self) -> list[Organization]:
        query = select(organizations).order_by(organizations.c.id)
        return [Organization(**row) for row in self.connection.execute(query).mappings()]

    def set_limits(self, id: str, limits: Mapping[str, int | None]) -> Organization:
        """Change limits, and create the organization if it is new.

        A limit that is not named is left as it is; None means the server's default from now on.
        """
        self.insert_new(organizations, _organization_row(id, self.now))
        if limits:
            self.connection.execute(update(organizations).where(organizations.c.id == id).values(**limits))
        RevisionQueries(self.connection, self.now).advance("keys")
        found = self.get(id)
        assert found is not None
        return found


class KeyQueries(Queries):
    def create(self, key: ApiKey) -> bool:
        """Insert a key, and its organization if that is new. Return False if the id or the digest exists."""
        self.insert_new(organizations, _organization_row(key.organization, self.now))
        row = msgspec.structs.asdict(key)
        row["models"] = None if key.models is None else msgspec.json.encode(key.models).decode()
        if not self.insert_new(api_keys, row):
            return False
        RevisionQueries(self.connection, self.now).advance("keys")
        return True

    def get(self, id: str) -> ApiKey | None:
        found = self.connection.execute(select(api_keys).where(api_keys.c.id == id)).mappings().first()
        return None if found is None else _read_key(found)

    def all(self, organization: str | None = None) -> list[ApiKey]:
        """Return all keys of an organization, or of every one, including revoked and expired keys."""
        query = select(api_keys).order_by(api_keys.c.organization, api_keys.c.created_at, api_keys.c.id)
        if organization is not None:
            query = query.where(api_keys.c.organization == organization)
        return [_read_key(row) for row in self.connection.execute(query).mappings()]

    def revoke(self, id: str) -> ApiKey | None:
        """Revoke a key, and return it, or None if there is no such key. `revoked_at` is the first revocation."""
        change = update(api_keys).where(api_keys.c.id == id, api_keys.c.revoked_at.is_(None))
        if self.connection.execute(change.values(revoked_at=int(self.now))).rowcount > 0:
            RevisionQueries(self.connection, self.now).advance("keys")
        return self.get(id)

    def touch(self, used: Mapping[str, float]) -> None:
        """Record when keys were last used; an earlier time than the stored one changes nothing.

        This advances no revision, since processes do not cache it. Updates are in the order of ids, against deadlocks.
        """
        if not used:
            return
        last, at = api_keys.c.last_used_at, bindparam("used_at", type_=BigInteger)
        change = update(api_keys).where(api_keys.c.id == bindparam("used"), or_(last.is_(None), last < at))
        rows = [{"used": id, "used_at": int(used[id])} for id in sorted(used)]
        self.connection.execute(change.values(last_used_at=at), rows)

    def snapshot(self) -> KeySnapshot:
        """Return what a process needs to authenticate requests."""
        recent = or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > self.now - EXPIRED_KEY_SECONDS)
        query = select(api_keys).where(and_(api_keys.c.revoked_at.is_(None), recent))
        return KeySnapshot(
            revision=RevisionQueries(self.connection, self.now).get("keys"),
            keys=tuple(_read_key(row) for row in self.connection.execute(query).mappings()),
            organizations={each.id: each for each in OrganizationQueries(self.connection, self.now).all()},
            any_ever_created=self.connection.execute(select(1).select_from(api_keys).limit(1)).first() is not None,
        )

    def has_valid_key(self) -> bool:
        """Return whether there is a key that is neither revoked nor expired."""
        query = (
            select(1).select_from(api_keys).where(api_keys.c.revoked_at.is_(None), self.not_expired(api_keys)).limit(1)
        )
        return self.connection.execute(query).first() is not None


def _organization_row(id: str, now: float) -> dict[str, Any]:
    return {"id": id, "created_at": int(now)}


def _read_key(row: Any) -> ApiKey:
    models = row["models"]
    return ApiKey(**{**row, "models": None if models is None else _decode_models(models)})
