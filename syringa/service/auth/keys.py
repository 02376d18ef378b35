"""API keys: their format, what is stored of one, and the caller that it identifies."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import time
from collections.abc import Collection

import msgspec

from syringa.errors import InvalidRequest
from syringa.store import ApiKey

PREFIX = "sk-syr-"
MAX_LIMIT = 10**12
MAX_TIMESTAMP = 253402300799  # the end of the year 9999

_ALPHABET = string.ascii_letters + string.digits  # a double click selects the whole key
_LENGTH = 43  # of 62 characters: 256 bits
KEY_LENGTH = len(PREFIX) + _LENGTH
_ORGANIZATION = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an organization or of an API key. 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0  # requests at the same time


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request, as its API key identifies it. The key itself is not part of it."""

    organization: str = ""
    key: str = ""  # the key's id; empty if the server needs no key
    admin: bool = False
    models: frozenset[str] | None = None  # ids of the models that it may use; None: all
    rates: RateLimits = RateLimits()  # of the organization as a whole
    key_rates: RateLimits = RateLimits()  # of this key alone


ANONYMOUS = Caller(admin=True)
"""The caller of every request to a server without keys."""


def generate_key() -> str:
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


def digest(key: str | bytes) -> str:
    """Return the hash that is stored of a key.

    A key has 256 random bits, so a fast hash is safe; a slow password hash would delay every request.
    """
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def create_api_key(
    organization: str,
    *,
    name: str = "",
    admin: bool = False,
    models: Collection[str] | None = None,
    rates: RateLimits = RateLimits(),
    expires_at: int | None = None,
    now: float | None = None,
) -> tuple[str, ApiKey]:
    """Return a new key and the record to store. Raises `InvalidRequest` for invalid values."""
    now = time.time() if now is None else now
    check_organization(organization)
    if len(name) > 100 or not name.isprintable():
        raise InvalidRequest("a key's name has at most 100 printable characters", param="name")
    if models is not None and not all(0 < len(each) <= 256 and each.isprintable() for each in models):
        raise InvalidRequest("a model's id has 1 to 256 printable characters", param="models")
    if expires_at is not None and not now < expires_at <= MAX_TIMESTAMP:
        raise InvalidRequest("a key expires in the future, and before the year 10000", param="expires_at")
    limits = msgspec.structs.asdict(rates)
    for each, limit in limits.items():
        check_limit(each, limit)
    key = generate_key()
    return key, ApiKey(
        id=f"key_{secrets.token_hex(8)}",
        organization=organization,
        name=name,
        digest=digest(key),
        hint=key[: len(PREFIX) + 4],
        admin=admin,
        models=None if models is None else tuple(sorted(set(models))),
        created_at=int(now),
        expires_at=expires_at,
        **{each: limit or None for each, limit in limits.items()},
    )


def check_organization(id: str) -> None:
    if not _ORGANIZATION.fullmatch(id):
        raise InvalidRequest(
            "an organization's id has 1 to 64 characters, which are letters (a to z), digits, dots, _ and -",
            param="organization",
        )


def check_limit(name: str, limit: int | None) -> None:
    if limit is not None and not 0 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"{name}: expected a whole number from 0 (no limit) to {MAX_LIMIT}", param=name)
