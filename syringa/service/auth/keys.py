"""API keys: what one looks like, what is kept of it, and what an organisation may be called."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import time
from collections.abc import Collection

import msgspec

from syringa.errors import InvalidRequest
from syringa.service.auth.caller import Rates
from syringa.store import ApiKey

PREFIX = "sk-syr-"
LARGEST_LIMIT = 10**12
LAST_MOMENT = 253402300799  # the end of the year 9999

_CHARACTERS = string.ascii_letters + string.digits  # a double click selects all of it
_LENGTH = 43  # of 62 characters: 256 bits
_ORGANISATION = re.compile(r"[A-Za-z0-9._-]{1,64}")


def draw() -> str:
    return PREFIX + "".join(secrets.choice(_CHARACTERS) for _ in range(_LENGTH))


def digest(key: str | bytes) -> str:
    """What is kept of a key. It has 256 random bits, so nobody guesses it from a fast hash; a slow one is for
    passwords, and would cost every request."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def mint(
    organisation: str,
    *,
    name: str = "",
    admin: bool = False,
    models: Collection[str] | None = None,
    rates: Rates = Rates(),
    expires_at: int | None = None,
    now: float | None = None,
) -> tuple[str, ApiKey]:
    """A new key, and what is to be stored of it. Raises `InvalidRequest` for what cannot be."""
    now = time.time() if now is None else now
    check_organisation(organisation)
    if len(name) > 100 or not name.isprintable():
        raise InvalidRequest("a key's name has at most 100 printable characters", param="name")
    if models is not None and not all(0 < len(each) <= 256 and each.isprintable() for each in models):
        raise InvalidRequest("a model's id has 1 to 256 printable characters", param="models")
    if expires_at is not None and not now < expires_at <= LAST_MOMENT:
        raise InvalidRequest("a key expires in the future, and before the year 10000", param="expires_at")
    limits = msgspec.structs.asdict(rates)
    for each, limit in limits.items():
        check_limit(each, limit)
    key = draw()
    return key, ApiKey(
        id=f"key_{secrets.token_hex(8)}",
        organisation=organisation,
        name=name,
        digest=digest(key),
        hint=key[: len(PREFIX) + 4],
        admin=admin,
        models=None if models is None else tuple(sorted(set(models))),
        created_at=int(now),
        expires_at=expires_at,
        **{each: limit or None for each, limit in limits.items()},
    )


def check_organisation(id: str) -> None:
    if not _ORGANISATION.fullmatch(id):
        raise InvalidRequest(
            "an organisation's id has 1 to 64 characters, which are letters (a to z), digits, dots, _ and -",
            param="organisation",
        )


def check_limit(name: str, limit: int | None) -> None:
    if limit is not None and not 0 <= limit <= LARGEST_LIMIT:
        raise InvalidRequest(f"{name}: expected a whole number from 0 (no limit) to {LARGEST_LIMIT}", param=name)
